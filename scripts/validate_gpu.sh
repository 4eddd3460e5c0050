#!/usr/bin/env bash
# Validates and measures on GPUs, part by part, each under eight minutes:  scripts/validate_gpu.sh PART…
#   trainer   ranks, layouts, heads, checkpoints agree (two GPUs if there are two)
#   adapters  LoRA on one and on several ranks
#   packing   tries with FlexAttention against rows          memory   chunked and fused heads against all logits
#   recipe sync publish lora routing modes, and on two GPUs apart together kill transports transports_tp2 affinity lost
#             whole runs on SGLang: scripts/validate_sglang.py; MODEL names SmolLM2 (a GGUF file or a directory),
#             SGLANG_PYTHON and SGLANG_PATH a Python that has SGLang and what it needs on its path, SETTINGS settings of
#             every run (engine.sglang.attention=triton …)
#   step      tokens per second against a plain loop         delta    differences against whole snapshots
# PYTHON names the interpreter; WHEELS a folder of wheels to install first on a machine without a registry.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-.}
if [ -n "${WHEELS:-}" ]; then
    site=$(mktemp -d)
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl || exit 1
    export PYTHONPATH="$site:$PWD"
fi
"$PYTHON" -c 'import torch, transformers; print("torch", torch.__version__, "transformers", transformers.__version__, "GPUs", torch.cuda.device_count())'
gpus=$("$PYTHON" -c 'import torch; print(max(1, torch.cuda.device_count()))')
failed=0
for part in "$@"; do
    echo "== $part"
    case $part in
        trainer) run="scripts.validate_trainer --hidden 1024 --layers 8 --vocabulary 32000 --dtype bfloat16 --ranks $gpus --parts ranks layouts heads checkpoints" ;;
        adapters) run="scripts.validate_trainer --hidden 1024 --layers 8 --vocabulary 32000 --dtype bfloat16 --ranks $gpus --parts adapters" ;;
        packing) run="benchmarks.tree_packing --hidden 1024 --layers 12 --scale 8 --dtype bfloat16 --repeat 5" ;;
        memory) run="benchmarks.loss_memory --tokens 32768 --vocabulary 131072 --hidden 1024 --heads plain chunked liger" ;;
        step) run="benchmarks.train_step --hidden 2048 --layers 16 --vocabulary 65536 --rows 32 --prompt 1024 --answer 1024 --budget 16384 --dtype bfloat16" ;;
        delta) run="benchmarks.delta_sync --hidden 1024 --layers 24 --lr 1e-6" ;;
        recipe | sync | publish | lora | routing | modes | apart | together | kill | transports | transports_tp2 | affinity | lost)
            run="scripts.validate_sglang $part --model ${MODEL:?names SmolLM2} --out $OUT/sglang"
            run="$run ${SGLANG_PYTHON:+--python $SGLANG_PYTHON} ${SGLANG_PATH:+--path $SGLANG_PATH} -- ${SETTINGS:-}"
            ;;
        *) echo "no part $part"; exit 2 ;;
    esac
    # shellcheck disable=SC2086
    timeout 470 "$PYTHON" -m $run 2>&1 | tee "$OUT/$part.txt" || { failed=1; echo "$part FAILED"; }
done
exit $failed
