#!/bin/bash
# Makes the JSON of the papers' rows anew, and docs/papers.md of it: benchmarks/papers/all.sh [--wan | --wan-alone]
# Without --wan nothing needs root; that takes about half an hour of a processor, and uses all. --wan runs real nodes
# in network namespaces, too, as root; then nothing else should run on the machine. --wan-alone is that part: 31
# minutes, and about 20 more for the trainings, which come last. What each step took is said as it ends.
set -eu
case "${1:-}" in "" | --wan | --wan-alone) ;; *) echo "usage: $0 [--wan | --wan-alone], not $1" >&2 && exit 2 ;; esac
cd "$(dirname "$0")/../.."
PAPERS=docs/data/papers
LOGS=$(mktemp -d)
export PAPERS LOGS PYTHON="${PYTHON:-python}"
trap 'rm -rf "$LOGS"' EXIT

run() { # run NAME ARGUMENT...: makes NAME.json
    local from=$SECONDS log=$LOGS/${1##*/} json=$PAPERS/$1.json
    shift
    if "$PYTHON" "$@" --json "$json" >"$log" 2>&1; then
        echo "$((SECONDS - from)) s: $*" >&2
    else
        cat "$log" >&2
        echo "failed after $((SECONDS - from)) s: $*" >&2
        return 1
    fi
}
export -f run

each() { xargs --max-procs "$1" --max-lines=1 bash -c 'run "$@"' run; } # a line of arguments after the other

[ "${1:-}" = --wan-alone ] || each "$(nproc)" <<'STEPS'
loss_bounds benchmarks/studies/loss_bounds.py cnn mlp mlp-cancer gpt
netstorm_fig20 benchmarks/papers/netstorm_fig20.py
paper_preset benchmarks/studies/paper_preset.py --rounds 6
netstorm_fig1 benchmarks/papers/netstorm_fig1.py
netstorm_fig14 benchmarks/papers/netstorm_fig14.py
netstorm_fig15 benchmarks/papers/netstorm_fig15.py
netstorm_fig18 benchmarks/papers/netstorm_fig18.py
netstorm_fig19 benchmarks/papers/netstorm_fig19.py
mlnet_fig1 benchmarks/papers/mlnet_fig1.py
mlnet_fig2 benchmarks/papers/mlnet_fig2.py
../job-priorities benchmarks/studies/job_priorities.py --jobs 5 --nodes 4 --seeds 11,12,13 --rounds 3 --most 16MB
../tree-staleness benchmarks/studies/tree_staleness.py --nodes
../small-models benchmarks/studies/small_models.py
packet_paths benchmarks/studies/packet_paths.py
STEPS

case "${1:-}" in --wan*)
    internet2=examples/networks/internet2.yaml
    store="-m netstorm bench wan $internet2 --rates-scale 0.5 --sizes 16MB --warmup 1 --rounds 3 --timeout 300"
    lanes="benchmarks/studies/datagrams.py --seconds 12"
    training="-m netstorm bench train $internet2 --to-target --epochs 10"
    digits="--rates-scale 0.25 --model cnn --width 512 --batch-size 8 --lr 0.05 --epoch-steps 8 --mxnet-epochs 2"
    each 1 <<STEPS
wan_topologies $store --systems netstorm-star,netstorm-balanced,netstorm-k-ary,netstorm-mst,netstorm-fapt,netstorm-packing
wan_paper $store --systems netstorm-paper-lite,netstorm-paper-std,netstorm-paper-pro,netstorm-fapt,netstorm-packing
wan_priorities benchmarks/studies/wan_priorities.py examples/networks/pair.yaml --turns 3
wan_compression -m netstorm bench compression $internet2 --rates-scale 0.1 --rounds 3 --codecs fp16,int8,topk,bsc,2bit
mlt_ablation $lanes --ablation --turns 2
mlt_loss $lanes --loss 0,0.01%,0.1%,1% --modes datagrams,tcp-bbr,tcp-cubic
mlt_dips $lanes --loss 0 --bursts 0 --dips --turns 3 --modes datagrams,late-bbr,tcp-bbr,tcp-cubic
mlt_bounds $lanes --loss 1% --bursts 0 --dips --turns 2 --modes datagrams --bounds 0.01,0.1,0.2,0.3
mlt_cpu $lanes --loss 0 --bursts 0 --turns 2 --modes datagrams,tcp-bbr
wan_alexnet $training --model alexnet --batch-size 32 --lr 1e-4 --target 0.8 --epoch-steps 5 --mxnet-epochs 1 --timeout 900 --systems mxnet-star-best,netstorm-packing
wan_training_1 $training $digits --seed 1 --systems mxnet-star-best,netstorm-packing --techniques fp16,int8,powersgd:rank=16,bsc,local:steps=4,local:steps=4+int8
wan_training_2 $training $digits --seed 2 --systems mxnet-star-best,netstorm-packing --techniques int8,local:steps=4+int8
STEPS
    ;;
esac
"$PYTHON" benchmarks/papers/table.py
echo "$SECONDS s: all" >&2
