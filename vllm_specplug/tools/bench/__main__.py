import sys

from vllm_specplug.tools.cli import main

sys.exit(main(["bench", *sys.argv[1:]]))
