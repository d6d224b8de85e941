#!/bin/sh
# Makes the JSON of the papers' rows anew, and docs/papers.md of it: benchmarks/papers/all.sh [--wan]
# Without --wan nothing needs root; it takes about half an hour on two cores. --wan runs real nodes in network
# namespaces, as root, for well over an hour more; then nothing else should run on the machine.
set -eu
cd "$(dirname "$0")/../.."
data=docs/data
run() { echo "$@" >&2; "${PYTHON:-python}" "$@"; }

for figure in netstorm_fig1 netstorm_fig14 netstorm_fig15 netstorm_fig18 netstorm_fig19 netstorm_fig20 mlnet_fig1 mlnet_fig2; do
    run "benchmarks/papers/$figure.py" --json "$data/papers/$figure.json"
done
run benchmarks/studies/job_priorities.py --jobs 5 --nodes 4 --seeds 11,12,13 --rounds 3 --most 16MB \
    --json "$data/job-priorities.json"
run benchmarks/studies/tree_staleness.py --nodes --json "$data/tree-staleness.json"
run benchmarks/studies/small_models.py --json "$data/small-models.json"
run benchmarks/studies/paper_preset.py --rounds 6 --json "$data/papers/paper_preset.json"
run benchmarks/studies/loss_bounds.py cnn mlp mlp-cancer gpt --json "$data/papers/loss_bounds.json"
run benchmarks/studies/packet_paths.py --json "$data/papers/packet_paths.json"
if [ "${1:-}" = --wan ]; then
    run -m netstorm bench wan examples/networks/internet2.yaml --rates-scale 0.5 --sizes 16MB --warmup 1 --rounds 3 \
        --timeout 300 --json "$data/papers/wan_topologies.json" \
        --systems netstorm-star,netstorm-balanced,netstorm-k-ary,netstorm-mst,netstorm-fapt,netstorm-packing
    run benchmarks/studies/wan_priorities.py examples/networks/pair.yaml --turns 3 \
        --json "$data/papers/wan_priorities.json"
    run -m netstorm bench compression examples/networks/internet2.yaml --rates-scale 0.1 --rounds 3 \
        --codecs fp16,int8,topk,bsc,2bit --json "$data/papers/wan_compression.json"
    run -m netstorm bench wan examples/networks/internet2.yaml --rates-scale 0.5 --sizes 16MB --warmup 1 --rounds 3 \
        --json "$data/papers/wan_paper.json" \
        --systems netstorm-paper-lite,netstorm-paper-std,netstorm-paper-pro,netstorm-fapt,netstorm-packing
    lanes="benchmarks/studies/datagrams.py --seconds 18"
    run $lanes --ablation --turns 2 --json "$data/papers/mlt_ablation.json"
    run $lanes --loss 0,0.01%,0.1%,1% --modes datagrams,tcp-bbr,tcp-cubic --json "$data/papers/mlt_loss.json"
    run $lanes --loss 0 --bursts 0 --dips --turns 3 --modes datagrams,late-bbr,tcp-bbr,tcp-cubic \
        --json "$data/papers/mlt_dips.json"
    run $lanes --loss 1% --bursts 0 --dips --turns 2 --modes datagrams --bounds 0.01,0.1,0.2,0.3 \
        --json "$data/papers/mlt_bounds.json"
    run $lanes --loss 0 --bursts 0 --turns 2 --modes datagrams,tcp-bbr --json "$data/papers/mlt_cpu.json"
    run -m netstorm bench train examples/networks/internet2.yaml --model alexnet --batch-size 32 --lr 1e-4 \
        --target 0.8 --epochs 10 --epoch-steps 5 --mxnet-epochs 1 --timeout 900 \
        --systems mxnet-star-best,netstorm-packing --json "$data/papers/wan_alexnet.json"
    for seed in 1 2; do
        run -m netstorm bench train examples/networks/internet2.yaml --rates-scale 0.25 --model cnn --width 512 \
            --batch-size 8 --lr 0.05 --epochs 10 --epoch-steps 8 --mxnet-epochs 2 --seed $seed \
            --systems mxnet-star-best,netstorm-packing --json "$data/papers/wan_training_$seed.json" \
            --techniques fp16,int8,powersgd:rank=16,bsc,local:steps=4,local:steps=4+int8
    done
fi
run benchmarks/papers/table.py
