import sys

from vllm_specplug.cli.cli import main

sys.exit(main(["bench", *sys.argv[1:]]))
