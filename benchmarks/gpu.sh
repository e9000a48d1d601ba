#!/bin/sh
# What one NVIDIA GPU makes of this code, part by part, for a machine with Python 3.12 and
# PyTorch, without a network:
#
#     make gpu-bundle                              # Here: wheels into dist/gpu
#     sh benchmarks/gpu.sh dist/gpu OUT [PART ...] # There: OUT/log.txt, gpu.json, warp.json
#
# Each part has a time limit of its own, and writes its results as they come, so that one that
# hangs costs no other. Without PART all but `kernels`, `compiled`, `streams` and `pong` run,
# in 18 minutes at most; where a command has ten, `machine tests learning warp inference` have
# room in one, `learner agents runs` in another.
set -u
wheels=$(realpath "$1")
mkdir -p "$2"
out=$(realpath "$2")
shift 2
cd "$(dirname "$0")/.." || exit
site=$(mktemp -d)
# (A venv would not see the PyTorch of a python3 that is in a venv itself.)
python3 -m pip install --quiet --no-index --no-deps --target "$site" "$wheels"/*.whl || exit
export PYTHONPATH="$PWD:$site" PYTHONUNBUFFERED=1

# Of tests/test_learning.py what is learned within a minute.
learned="catch-servers pqn_catch-serial masked-servers ppo_mixed-serial dqn_catch-serial
cartpole-actors memory-serial td3_target-serial"

run() { # Seconds at most, then a command.
    limit=$1
    shift
    echo "== $*" | tee -a "$out/log.txt"
    # By Ctrl-C, after which pytest says what has failed so far.
    timeout -s INT --kill-after=10 "$limit" "$@" > "$out/part.txt" 2>&1
    echo "exit code $?" >> "$out/part.txt"
    tail -n 25 "$out/part.txt"
    cat "$out/part.txt" >> "$out/log.txt"
    rm "$out/part.txt"
}

tests() { # Seconds at most, then pytest's arguments.
    limit=$1
    shift
    run "$limit" python3 -m pytest -n "$(($(nproc) / 2))" --dist worksteal -vv -rPfE --tb=short \
        -p no:cacheprovider -m "" "$@"
}

gpu() { # Parts of gpu.py.
    limit=$1
    shift
    run "$limit" python3 benchmarks/gpu.py --out "$out" --seconds 2 --parts "$@"
}

for part in ${*:-machine tests learning warp inference learner agents runs}; do
    case $part in
    machine)
        run 10 nvidia-smi
        run 5 lscpu
        run 30 python3 -c "import ale_py, polybeast, torch, _libtorchbeast
print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name())
print(torch.cuda.get_arch_list(), torch.ones(2, device='cuda').sum().item())"
        ;;
    tests) tests 240 tests/cuda.py ;;
    learning)
        tests 150 tests/test_learning.py::test_learns_from_an_image \
            $(for x in $learned; do echo "tests/test_learning.py::test_learns[$x]"; done)
        ;;
    warp) run 90 python3 -m benchmarks.warp --rounds 1 --seconds 2 --json "$out/warp.json" ;;
    inference) gpu 40 inference ;;
    learner) gpu 110 learner ;;
    kernels) gpu 60 kernels ;;
    agents) gpu 145 agents ;;
    compiled)
        gpu 240 compiled
        run 240 python3 -m benchmarks.warp --rounds 1 --seconds 2 --compile --num_epochs 1 \
            --json "$out/warp-compiled.json"
        ;;
    pong) gpu 560 pong ;;
    runs) gpu 270 environments runs ;;
    streams) gpu 120 streams ;;
    *) echo "$part: expected machine, tests, learning, warp, inference, learner, kernels, agents," \
        "compiled, runs, streams or pong" ;;
    esac
done
