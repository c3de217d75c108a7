#!/bin/sh
# Measure everything in results/bench again, on a quiet machine, and put the tables into docs/performance.md:
#   sh benchmarks/record.sh
# PYTHON is the interpreter. It needs the extra `lab`, and orthogonium for that column. 30 to 60 minutes on two cores.
set -e
cd "$(dirname "$0")/.."
python=${PYTHON:-python}
results=results/bench
scratch=$(mktemp -d)

networks() { # file, network, width, rounds, methods, whether freed memory is kept, further options
    "$python" -m orthoconv bench networks --names "[$2]" --widths "[$3]" --rounds "$4" --methods "$5" \
        --keep_memory "$6" --out "$scratch" --device cpu $7 $8
    mv "$scratch/networks.json" "$results/$1.json"
}

all='[plain, plain conv, cayley, listing, bcop, cayley_bcop, rko, crko, ossn, aoc, lot, bro, soc, orthogonium]'
networks kwlarge kwlarge 1 15 "${all%]}, aol, cpl]" false
networks kwlarge_kept kwlarge 1 15 '[plain, plain conv, cayley, listing]' true
networks kwlarge_width_3 kwlarge 3 3 '[plain, plain conv, cayley, listing, crko, orthogonium]' false
networks resnet9 resnet9 1 3 "$all" false
networks wide_resnet10_10 wide_resnet10_10 1 5 '[plain, plain conv, cayley, bcop, rko, aoc, orthogonium]' false
networks wide_resnet10_10_batch_128 wide_resnet10_10 1 3 "[plain, cayley, bcop]" false --batch 128
"$python" -m orthoconv bench layers --rounds 5 --out "$scratch" --device cpu \
    --methods '[plain, cayley, listing, bcop, rko, crko, orthogonium]'
mv "$scratch/layers.json" "$results/layers.json"
mv "$scratch/layers.png" docs/layers.png
"$python" -m orthoconv bench regimes --out "$scratch" --device cpu --methods '[plain, cayley, bcop, rko, aoc]'
mv "$scratch/regimes.json" "$results/regimes.json"
"$python" benchmarks/published.py --out "$results/published.json"
"$python" benchmarks/tables.py --write
"$python" docs/figures.py --write
