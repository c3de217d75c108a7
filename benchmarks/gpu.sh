#!/bin/sh
# Runs once on a machine with an accelerator, and prints what docs/devices.md lacks. About half an hour on one GPU.
#
#     sh benchmarks/gpu.sh [DEVICE] [FOLDER]
#
# It prints the device; whether every layer of a trained network verifies there (a line "verified"); tables of ms per step
# with ratios to plain and Cayley, as `orthoconv bench` does; the seconds of an epoch of KWLarge in float32, bf16 and
# compiled. FOLDER/networks.json and FOLDER/layers.json are what to send us.
#
# QUICK=1 runs every step in small on digits, to see that the script works; its figures mean nothing, and nothing is
# compiled. PYTHON names the interpreter, if it is not `python`.
set -eu
device=${1:-auto}
out=${2:-runs/gpu}
orthoconv() { "${PYTHON:-python}" -m orthoconv "$@" --device "$device"; }
if [ -n "${QUICK:-}" ]; then
    layers="--panels [a] --methods [plain,cayley] --rounds 1 --batch 2"
    networks="--names [kwlarge] --widths [1] --methods [plain,cayley] --rounds 1 --batch 2"
    train="--data digits --model.width 0.0625 --recipe.epochs 1 --recipe.batch_size 100 --recipe.augment false"
    verify="--images 20 --attack 4" evaluate="--attack_examples 4 --apgd_iterations 2" compiled=""
else
    layers="--rounds 20" networks="--rounds 20" train="--data cifar10 --recipe.epochs 2"
    verify="--images 500 --attack 100" evaluate="--attack_examples 1000" compiled="compile=true"
fi
mkdir -p "$out"
"${PYTHON:-python}" -c 'import torch; print("torch", torch.__version__, torch.accelerator.current_accelerator())'
# shellcheck disable=SC2086
orthoconv bench layers --out "$out" $layers
# shellcheck disable=SC2086
orthoconv bench networks --out "$out" $networks
for option in precision=float32 precision=bf16 $compiled; do
    echo "KWLarge, --$option"
    # shellcheck disable=SC2086
    orthoconv train --out "$out/$option" "--$option" $train
done
network=kwlarge_cayley_cifar10
if [ -n "${QUICK:-}" ]; then network="$out/precision=float32"; fi
# shellcheck disable=SC2086
orthoconv verify "$network" $verify
# shellcheck disable=SC2086
orthoconv evaluate "$out/precision=float32" $evaluate
