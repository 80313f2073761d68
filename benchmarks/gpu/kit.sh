# Source this in the root of the sources, on a machine without a package index:
#
#   . benchmarks/gpu/kit.sh KIT.tar.xz [FOLDER]
#
# It unpacks KIT.tar.xz, an archive of installed Python packages (vLLM among them), to FOLDER/site, installs this project
# beside them, copies benchmarks and tests to FOLDER/run and goes there: in the root itself, Python would find the
# sources of vllm_specplug instead of the installed package.  FOLDER is $HOME/kit by default.
kit_folder=${2:-$HOME/kit}
mkdir -p "$kit_folder/site" "$kit_folder/run"
[ -d "$kit_folder/site/vllm" ] || tar xJf "$1" -C "$kit_folder/site" || return
python3 -m pip install -q --no-deps --no-index --no-build-isolation --no-compile --upgrade --target "$kit_folder/site" . || return
cp -r benchmarks tests pyproject.toml "$kit_folder/run" || return
export PYTHONPATH=$kit_folder/site VLLM_USE_V2_MODEL_RUNNER=1 VLLM_NO_USAGE_STATS=1 HF_HUB_OFFLINE=1
cd "$kit_folder/run" || return
