"""The attention that vLLM chooses on a Blackwell GPU, by its own list; no GPU is asked."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

from vllm_specplug.gpu import attention
from vllm_specplug.gpu.attention import BACKENDS, device_tree_backends, log_backends

FLASHINFER = AttentionBackendEnum.FLASHINFER


class FlashInferBackend:
    """Stands in for vLLM's, whose library is not installed."""

    validate_configuration = staticmethod(lambda **_: [])
    full_cls_name = staticmethod(lambda: ("flashinfer", "FlashInferBackend"))


@pytest.fixture
def chosen(monkeypatch):
    """``chosen(**changes)``: path of the backend that vLLM's CUDA platform chooses."""
    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", ModuleType("operators of CUDA"))
    from vllm.platforms import cuda

    def class_of(backend):
        is_vllms = backend == FLASHINFER and not backend.is_overridden()
        return FlashInferBackend if is_vllms else backend.get_class()

    monkeypatch.setattr(cuda, "_get_attn_backend_class", class_of)
    monkeypatch.setattr(flash_attn.FlashAttentionBackend, "validate_configuration", classmethod(fits))
    platform = cuda.CudaPlatformBase
    monkeypatch.setattr(platform, "get_device_capability", classmethod(lambda *_: DeviceCapability(10, 0)))
    monkeypatch.setattr(platform, "get_device_name", classmethod(lambda *_: "Blackwell"))

    def choose(selected=None, dtype=torch.bfloat16):
        config = AttentionSelectorConfig(128, dtype, "auto", 16)
        return platform.get_attn_backend_cls(selected, config, 32)

    return choose


def fits(_, dtype, **__):
    return [] if dtype != torch.float32 else ["float32"]


def test_flash_attention_takes_the_place_of_flashinfer(chosen):
    assert chosen().endswith("FlashInferBackend")
    with device_tree_backends():
        assert chosen() == BACKENDS[AttentionBackendEnum.FLASH_ATTN]
        assert chosen(dtype=torch.float32) == BACKENDS[AttentionBackendEnum.TRITON_ATTN]
    with device_tree_backends(FLASHINFER):  # the user's own: refused later, by name
        assert chosen(FLASHINFER).endswith("FlashInferBackend")
    assert chosen().endswith("FlashInferBackend")  # other engines of the process


def test_the_log_names_it(monkeypatch, caplog):
    backend = SimpleNamespace(get_name=lambda: "FLASH_ATTN")
    layers = {"layer": SimpleNamespace(get_attn_backend=lambda: backend)}
    for family, chosen, said in ((90, None, 0), (100, FLASHINFER, 0), (100, None, 1)):
        platform = SimpleNamespace(is_device_capability_family=lambda asked, family=family: asked == family)
        monkeypatch.setattr(attention, "current_platform", platform)
        caplog.clear()
        with caplog.at_level("INFO", logger="vllm_specplug"):
            log_backends(layers, chosen)
        assert caplog.text.count("attention backend FLASH_ATTN: FLASHINFER") == said
