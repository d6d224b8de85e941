#!/usr/bin/env bash
# Trains a small CNN on four general nodes of this machine and compares their weights byte by byte, with MXNet and with
# PyTorch; then races MXNet's own parameter server against NetStorm on an emulated WAN of nine data centres.
#
#   scripts/demo.sh [--epochs N]
#
# The first run makes .venv and installs NetStorm, MXNet and PyTorch there, which takes some minutes. The WAN needs root,
# as in `sudo scripts/demo.sh`, or what the demo then names; without it the race is on loopback.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/venv.sh

make_venv examples
PATH="$PWD/.venv/bin:$PATH"

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

compare() { # the digests in the output of four ranks
    if [ "$(grep -o 'sha256 .*' "$1" | sort | uniq -c | awk '{print $1}')" != 4 ]; then
        echo "The weights of the four ranks differ" >&2
        exit 1
    fi
    echo "The weights of all 4 ranks are the same, byte for byte."
}

cat <<'TEXT'

1. Four general nodes and a scheduler start on this machine. Each node trains on its quarter of scikit-learn's digits,
   adds up its neighbours' gradients and forwards them: there is no server.

TEXT
netstorm launch -n 4 -- python examples/gluon_digits.py --epochs 5 --digest "$@" | tee "$folder/mxnet"
compare "$folder/mxnet"

cat <<'TEXT'

2. The same with PyTorch: torchrun starts four ranks of a script with DistributedDataParallel. Its only word of NetStorm
   is init_process_group("netstorm"): rank 0 starts the scheduler.

TEXT
OMP_NUM_THREADS=1 torchrun --nproc-per-node 4 examples/torch_digits.py --epochs 5 --digest | tee "$folder/torch"
compare "$folder/torch"

missing=$(python -c 'from netstorm.lab.emulation import unmet_requirements; print("; ".join(unmet_requirements()))')
missing=${missing//netstorm wan …/scripts/demo.sh}
if [ -z "$missing" ]; then
    cat <<'TEXT'

3. Nine data centres, joined by the links of examples/networks/internet2.yaml at half their rates: 10 to 75 Mbit/s, 30 ms
   each way, .02 % of packets lost. Each is a network namespace of this machine, and the links are emulated. The published
   MXNet and NetStorm take turns there in adding up 8 MB of gradients of all nine, checked number by number: a minute or two.

TEXT
    netstorm bench wan examples/networks/internet2.yaml --rates-scale 0.5 --sizes 8MB --warmup 1 --rounds 3 \
        --seconds 60 --systems mxnet-star-best,netstorm-packing --short
else
    cat <<TEXT

3. MXNet's own parameter server and NetStorm take turns in adding up 40 MB of gradients of four nodes.
   On loopback, where no link is slow; on an emulated WAN it needs $missing

TEXT
    netstorm bench wan examples/networks/four_sites.yaml --loopback --sizes 40MB --warmup 1 --rounds 5 \
        --seconds 30 --systems mxnet-star-best,netstorm-fapt --knowledge nothing --short
fi
cat <<'TEXT'

What to try next, in this folder (. .venv/bin/activate):
  torchrun --nproc-per-node 2 examples/torch_gpt.py --diloco 20    a small GPT whose ranks average every 20 steps
  netstorm launch -n 4 -- python examples/torch_hsdp.py --sites 2  shards inside sites, sums across them
  netstorm launch -n 4 -- python examples/gluon_digits.py --epochs 5 --digest
  netstorm launch -n 4 --topology star -- python examples/module_digits.py --optimizer adam
  netstorm launch -n 2 -- python -m netstorm.run YOUR_SCRIPT.py    an unedited script with dist_sync, or with Gloo
  netstorm plan examples/networks/mesh.yaml --model alexnet        what each topology would reach on a network
  netstorm env                                                     every setting, its value and its meaning
TEXT
