"""One word for a configuration that fits the model: lookup, a drafter if there is one, and the measured budget."""

from vllm_specplug.proposer import Method

from .choice import choose
from .options import AutoOptions

METHOD = Method("auto", AutoOptions, choose=choose)
