#!/usr/bin/env bash
# Every kernel on a small and on a ragged shape, K long enough for the ring to go round, and those that
# split K also with too little of it and with several tiles a CTA, under compute-sanitizer. Racecheck
# runs its own build (see kArrivingLanes in cuda/include/sp24/config.cuh), which is made if need be.
#   [JOBS=8] [ONLY='gemm_e4m3 and not row64'] tests/gpu/sanitize.sh PYTHON [memcheck|racecheck ...]
# JOBS tests run side by side (pytest-xdist); ONLY is a pytest expression that narrows them down.
# A test of many tiles may take minutes under racecheck.
set -euo pipefail
python=$1
shift
[ $# -gt 0 ] || set -- memcheck racecheck
sources() { "$python" -c 'import json, sys; print(json.load(open(sys.argv[1]))["sources"])' "$1"; }
for tool in "$@"; do
  echo "== $tool"
  kernels=sp24cli/kernels
  if [ "$tool" = racecheck ]; then
    kernels=build/racecheck
    if [ ! -f $kernels/kernels.json ] ||
      [ "$(sources $kernels/kernels.json)" != "$(sources sp24cli/kernels/kernels.json)" ]; then
      "$python" cuda/build.py --racecheck --output "$kernels"
    fi
  fi
  SP24_KERNELS=$kernels SP24_REQUIRE_GPU=1 SP24_RUNS=1 compute-sanitizer --tool "$tool" --error-exitcode 99 \
    --target-processes all "$python" -m pytest tests/gpu/test_gemm.py tests/gpu/test_pack.py \
    tests/gpu/test_ladder.py tests/gpu/test_tune.py tests/gpu/test_promoted.py tests/gpu/test_widened.py \
    tests/gpu/test_convert.py tests/gpu/test_activations.py -q -p no:cacheprovider --maxfail=20 --timeout=900 \
    ${JOBS:+--numprocesses=$JOBS --dist=loadgroup -p no:benchmark} \
    -k "((small_integers and (192x256x1280 or 65x300x1412)) or image or (number_of_blocks and (bf16_nm or f32_mn)) or (many_rows and e4m3_bf16_nm) or \
    (balanced and (e4m3_bf16_nm or s8_s32_nm or f16_f32_mn)) or \
    (tile_order and f32_mn and (_k2 or _k4)) or sum_the_same_numbers or \
    (every_blocks and 300x230x1412) or odd_shapes_are_pruned or (odd_shapes_are_packed and (3x12 or mx)) or \
    (other_patterns and (2:5 or 4:8)) or \
    gather or test_shapes)${ONLY:+ and ($ONLY)}"
done
