#!/bin/sh
# Runs once on a machine with an accelerator, and prints what docs/devices.md lacks. About half an hour on one GPU.
#
#     sh benchmarks/gpu.sh [DEVICE] [FOLDER]
#
# It prints the device; whether every layer of a trained network verifies there (a line "verified"); tables of ms per step
# with ratios to plain and Cayley, as `orthoconv bench` does; the seconds of an epoch of KWLarge in float32, bf16 and
# compiled. FOLDER/networks.json and FOLDER/layers.json are what to send us.
set -eu
device=${1:-auto}
out=${2:-runs/gpu}
mkdir -p "$out"
python -c 'import torch; print("torch", torch.__version__, torch.accelerator.current_accelerator())'
orthoconv verify kwlarge_cayley_cifar10 --images 500 --attack 100 --device "$device"
orthoconv bench layers --rounds 20 --device "$device" --out "$out"
orthoconv bench networks --rounds 20 --device "$device" --out "$out"
for options in "--precision float32" "--precision bf16" "--compile true"; do
    run="$out/train$(echo "$options" | tr -d ' -')"
    echo "KWLarge, two epochs, $options"
    # shellcheck disable=SC2086
    orthoconv train --out "$run" --data cifar10 --recipe.epochs 2 --device "$device" $options
done
orthoconv evaluate "$out/trainprecisionfloat32" --attack_examples 1000 --device "$device"
