import sys

from vllm_specplug.cli import main

sys.exit(main(["bench", *sys.argv[1:]]))
