#!/bin/sh
# Everything that needs a GPU, for a machine that one has for a few minutes. Two calls, because tests disturb timings:
#
#     scripts/on_a_gpu.sh check  [FOLDER] [SECONDS]    # tests and compile warm-up beside each other: 6 minutes
#     scripts/on_a_gpu.sh timing [FOLDER] [SECONDS]    # nothing else may use the GPU: 7 minutes
#
# FOLDER (./on_a_gpu) gets logs and reports, and FOLDER.tar.gz is packed anew after each part, so that a machine that is
# taken away loses one part at most. PYTHON names the Python to use (python3); no package has to be installed but torch,
# lightning, torchmetrics and, for the tests, pytest, hypothesis, pytest-timeout and pytest-xdist. TOY=1 rehearses it
# on a CPU in a few minutes.
set -u

what="${1:-}"
folder="${2:-on_a_gpu}"
python="${PYTHON:-python3}"
toy="${TOY:-}"
case "$what" in
check) seconds="${3:-360}" ;;
timing) seconds="${3:-420}" ;;
*)
    echo "usage: $0 check|timing [FOLDER] [SECONDS]" >&2
    exit 2
    ;;
esac

mkdir -p "$folder" || exit 2
folder="$(cd "$folder" && pwd)"
cd "$(dirname "$0")/.." || exit 2
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
# what one call compiles the next one reads
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$folder/compile_cache}"
begin="$(date +%s)"
left() { echo $((begin + seconds - $(date +%s))); }

pack() { tar -czf "$folder.tar.gz.part" --exclude compile_cache -C "$(dirname "$folder")" "$(basename "$folder")" &&
    mv "$folder.tar.gz.part" "$folder.tar.gz"; }

# part NAME SECONDS COMMAND...: ends it after SECONDS or when the time is over, whichever is first; SIGTERM lets it write.
part() {
    name="$1" most="$2" && shift 2
    rest="$(left)"
    [ "$rest" -lt "$most" ] && most="$rest"
    if [ "$most" -lt 5 ]; then
        echo "$name: not run, the time was over" | tee -a "$folder/summary.txt"
        return
    fi
    start="$(date +%s)"
    timeout -k 10 "$most" "$@" >"$folder/$name.log" 2>&1
    code=$?
    echo "$name: exit code $code after $(($(date +%s) - start)) s" | tee -a "$folder/summary.txt"
}

versions() {
    "$python" - <<'PYTHON'
import importlib.metadata as metadata, os, platform, torch
print("python", platform.python_version(), "cores", os.cpu_count())
for name in ("torch", "lightning", "torchmetrics", "torchao", "accelerate", "transformer_engine", "flashoptim", "triton"):
    try:
        print(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        print(name, "is not installed")
print("CUDA", torch.version.cuda, [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())])
PYTHON
    command -v nvidia-smi >/dev/null && nvidia-smi
    git log -1 --format='commit %H' 2>/dev/null || true
}

# A plugin of a package whose own needs are missing ends every run of pytest: none is loaded but those named here.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
tests() { # tests WORKERS: arguments of pytest
    plugins="-p pytest_timeout"
    "$python" -c "import xdist" 2>/dev/null && plugins="$plugins -p xdist.plugin -n $1 --dist loadfile"
    echo "$plugins -q --continue-on-collection-errors --tb=short"
}

bench() { # bench NAME SECONDS ARGUMENTS...
    name="$1" most="$2" && shift 2
    rest="$(left)"
    [ "$rest" -lt "$most" ] && most="$rest"
    minutes="$(awk "BEGIN { print ($most > 15 ? $most - 10 : 5) / 60 }")"
    # shellcheck disable=SC2086
    part "$name" "$most" "$python" tests/benchmarks/bench_gpu.py ${toy:+--toy} --out "$folder" --minutes "$minutes" "$@"
    pack
}

versions >"$folder/versions_$what.txt" 2>&1
echo "$what, $(date -u)" >>"$folder/summary.txt"

if [ "$what" = check ]; then
    accelerator=gpu workers=10 gpu_tests="$(grep -rl mark.gpu tests --include="test_*.py")"
    quick="tests/precision tests/optimizer_step tests/gradients tests/accumulation tests/callbacks"
    if [ -n "$toy" ]; then
        accelerator=record workers=2 gpu_tests=tests/precision/test_masters_on_gpu.py quick=tests/tools/test_on_gpu.py
    fi
    # The compiler's warm-up uses few cores at a time.
    (part warm_up "$seconds" "$python" tests/benchmarks/bench_gpu.py ${toy:+--toy} --warm-up --out "$folder/warm_up" \
        --only compiled) &
    warm_up=$!
    # shellcheck disable=SC2046,SC2086
    part marked_gpu 150 "$python" -m pytest $(tests 4) -m gpu --junitxml "$folder/marked_gpu.xml" $gpu_tests
    pack
    # shellcheck disable=SC2046,SC2086
    part quick_tests "$seconds" "$python" -m pytest $(tests $workers) -m "not full" --accelerator "$accelerator" \
        --junitxml "$folder/quick_tests.xml" $quick
    pack
    wait "$warm_up"
else
    bench bf16_124m 100 --repeats 2 --only "GPT-2 small, bf16-mixed, compiled"
    bench bf16_1_3b 90 --repeats 2 --only "1.3B, bf16-mixed, compiled by block, 1 micro"
    bench fp8_wide 100 --repeats 2 --only "8 layers"
    bench masters 80 --repeats 2 --only "GPT-2 small, master"
    bench memory 40 --only Memory "A real"
    bench loss 60 --only Loss
fi
pack
cat "$folder/summary.txt"
