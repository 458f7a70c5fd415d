#!/usr/bin/env bash
# Make every published figure anew: benchmarks/all.sh FOLDER [--quick] [STEP ...]
#
# Killed, the same command goes on where it was. --quick makes the least of each step, which
# allows no conclusion but shows that every script ends. A step whose packages are missing is
# skipped. Ends with 1 if a step failed; its output is FOLDER/logs/STEP.txt. Ends with 2, and makes
# nothing, if a step is unknown. What --quick makes is in FOLDER/quick. PYTHON names the
# interpreter.
set -uo pipefail

out=${1:?usage: benchmarks/all.sh FOLDER [--quick] [STEP ...]}
shift
# Paths are relative to the folder of the caller, commands run in that of the repository.
[[ $out = /* ]] || out=$PWD/$out
python=${PYTHON:-python}
# PATH says where a name without a slash is.
[[ $python != */* || $python = /* ]] || python=$PWD/$python
quick=
# A folder of its own: the least of a step is not the step.
[ "${1:-}" = --quick ] && { quick=1; out=$out/quick; shift; }
wanted=" $* "
cd "$(dirname "${BASH_SOURCE[0]}")/.."
failed=()
# Our method in the benchmark of operators: with as many seconds as stock, or the one that is quick.
ours=$([ -z "$quick" ] && echo long || echo default)

full() { [ -z "$quick" ]; }
bench() { "$python" -m "benchmarks.$@"; }
has() { "$python" -c "import $(printf '%s, ' "$@" | sed 's/, $//')" 2>/dev/null; }

# step NAME [PACKAGE ...]: run the function of that name, once.
step() {
  local name=$1 start=$SECONDS
  shift
  [[ "$wanted" = "  " || "$wanted" = *" $name "* ]] || return 0
  [ -e "$out/logs/$name.done" ] && { echo "$name: done before"; return 0; }
  if [ $# -gt 0 ] && ! has "$@"; then
    echo "$name: skipped, needs $*"
    return 0
  fi
  # Not as a condition: bash would go on after a command in it that fails.
  (set -e; "$name") >"$out/logs/$name.txt" 2>&1
  if [ $? -eq 0 ]; then
    touch "$out/logs/$name.done"
    echo "$name: $((SECONDS - start)) s"
  else
    failed+=("$name")
    echo "$name: FAILED, see $out/logs/$name.txt"
  fi
}

# What other figures are drawn from.
compared() {
  bench compare "$out/$1"
  rm -rf "$out/packed/$1" # of an attempt that ended before its step did
  bench pack "$out/$1" "$out/packed/$1"
}

operators() {
  # Stock takes minutes for its first batch.
  if full; then bench run --size operators --out "$out/operators"
  else bench run --size smoke --methods no-race default --noise 0.2 --out "$out/operators"; fi
  bench regret "$out/operators" --method "$ours" $(full || echo --quick)
  compared operators
}
first_trials() {
  full && bench run --size start --out "$out/start"
  full || bench run --workloads te:GMM --methods no-start default --trials 4 --seeds 1 \
    --noise 0.2 --no-remeasure --out "$out/start"
  compared start
}
# A network's name, the minutes of stock, and how often both are timed anew.
against_stock() {
  local name=$1 budget=$2 to=(--network-budget 3m --no-remeasure --out "$out/$1")
  shift 2
  # Ours before and after stock: the hours differ.
  bench run --workloads "$name" --methods default --seeds 1 "${to[@]}"
  bench run --workloads "$name" --methods stock --seeds 1 "${to[@]}" --network-budget "$budget"
  bench run --workloads "$name" --methods default --seeds 2 --first-seed 1 "${to[@]}"
  bench remeasure "$out/$name" "$@"
  compared "$name"
}
networks() {
  if full; then # on an older processor, stock needs 2.8 minutes for a result of a task
    against_stock resnet18 57m --rounds 9 --processes 3
    against_stock mobilenet_v2 88m --rounds 15 --processes 5
    against_stock transformer 27m --rounds 9 --processes 3
    return
  fi
  bench run --workloads resnet18 --methods default --network-budget 25s --seeds 1 --noise 0.2 \
    --no-remeasure --out "$out/resnet18"
  compared resnet18
}
ablation() {
  full && bench run --workloads te:GMM te:C2D te:DEP --methods ladder --seeds 3 --trials 256 \
    --out "$out/ladder"
  full || bench run --workloads te:GMM --methods ladder-9 --trials 4 --seeds 1 --noise 0.2 \
    --no-remeasure --out "$out/ladder"
  compared ladder
  full || return 0
  bench run --workloads te:GMM te:C2D --methods epsilon --seeds 3 --trials 256 --out "$out/epsilon"
  compared epsilon
  bench run --workloads resnet18 mobilenet_v2 transformer --methods families --seeds 3 \
    --network-trials 640 --out "$out/families"
  compared families
}
peers() {
  if full; then
    bench peers "$out/peers" --budget 60s
    bench peers "$out/peers" --budget 10m
    bench peers "$out/peers" --budget 60s --picture "$out/peers.svg"
    bench peers "$out/others" --budget 60s --others
    # Last, because it ends with 1 if a run of a network fails.
    bench budgets "$out/peers" --budgets 30s 60s --reference 10m --models ppocr_{det,rec,cls} \
      resnet18 mobilenet_v2 mobilenet_v3_small efficientnet_b0 encoder
  else
    bench peers "$out/peers" --models ppocr_cls --budget 30s --timings 1
    bench peers "$out/peers" --budget 30s --picture "$out/peers.svg"
    bench budgets "$out/peers" --models ppocr_cls --budgets 30s --reference 40s --seeds 0 --rounds 1
  fi
}
gap() {
  bench micro.gap "$out"/peers/*-"$(full && echo 60s || echo 30s)"-0/ \
    --rounds "$(full && echo 3 || echo 1)" --out "$out/gap.json"
}
preparation() {
  # In short, only a table without rows: each network is tuned five times.
  bench ablation "$out/preparation-ablation" --of preparation \
    $(full && echo --models resnet18 ppocr_det mobilenet_v3_small deit_tiny_patch16_224)
  bench micro.copies "$out/copies" $(full || echo --models ppocr_cls)
  bench micro.calls "$out/calls" $(full && echo --budget 60s || echo --kinds chain --counts 1)
}
zoo() {
  if full; then bench zoo.models "$out/zoo.jsonl"
  else bench zoo.models "$out/zoo.jsonl" onnx/light_squeezenet; fi
  bench zoo.models "$out/zoo.jsonl" --table
}
schedulers() {
  local networks=(resnet18 transformer mobilenet_v2 squeezenet1_1 resnet50 bert_base) data=() each
  full || networks=(resnet18)
  for each in "${networks[@]}"; do
    data+=("$out/data/$each-0.npz")
    [ -e "${data[-1]}" ] || bench scheduler.record "$each" --out "${data[-1]}" \
      $(full || echo --budget 60s)
  done
  if full; then bench scheduler.replay "${data[@]}" --seeds 20 --paper --out "$out/schedulers"
  else
    bench scheduler.replay benchmarks/data/resnet18-0.npz --seeds 1 --policies default gradient \
      --out "$out/schedulers"
  fi
}
figures() {
  local recordings=("$out"/data/*.npz) ladder=$out/packed/ladder
  full || { recordings=(benchmarks/data/resnet18-0.npz); ladder=benchmarks/results/ladder; }
  bench micro.variance --out "$out/variance.json" \
    $(full || echo --workloads GMM --candidates 2 --runs 20)
  bench figures dynatune-2 $(full && echo dynatune-{4,13,19,7,8,9,14,20}) \
    --recordings "${recordings[@]}" --out "$out/figures"
  bench figures adatune-{2,6} --bench "$out/packed/operators" --out "$out/figures"
  bench figures adatune-{7,8} --bench "$out/packed/resnet18" --out "$out/figures"
  bench figures adatune-{10,11} --bench "$ladder" --out "$out/figures"
  bench figures adatune-3 --runs "$out/variance.json" --out "$out/figures"
  full || return 0
  bench figures adatune-4 --bench "$out/packed/epsilon" --out "$out/figures"
  bench figures familyseer --bench "$out/packed/families" --out "$out/figures"
}
warm_starts() {
  local least=(--budget 25s --warm-budget 20s --rounds 0) short=(--budget 6m --warm-budget 80s)
  full || { bench micro.warm_start resnet18 --out "$out/warm-resnet18" "${least[@]}"; return; }
  bench micro.warm_start resnet18 --out "$out/warm-ten-minutes" --budget 10m
  bench micro.warm_start resnet18 --sibling resnet34 --sibling resnet50 \
    --out "$out/warm-resnet18" "${short[@]}"
  bench micro.warm_start transformer --sibling sequence=64 --no-again \
    --out "$out/warm-transformer" "${short[@]}"
}
starter_records() {
  # 3: the budget ended before all workloads were made.
  full || { bench starter "$out/starter" --threads 2 --trials 4 --budget 20s || [ $? -eq 3 ]; return; }
  bench starter "$out/starter" --threads 2
  bench starter "$out/starter" --threads 2 --pack "$out/starter.json.xz"
  bench starter.fading "$out/starter"
  bench ablation "$out/starter-ablation" --of starter --models resnet18 ppocr_det
}
measuring() {
  bench micro.runner --json $(full || echo --candidates 2 --workloads GMM) >"$out/runner.json"
  bench micro.racing --out "$out/racing.json" $(full || echo --candidates 2 --workloads GMM)
  bench micro.agreement "$out/operators/te-GMM/$ours/0" \
    --out "$out/agreement.json" $(full || echo --candidates 2 --rounds 1)
}
ranking() {
  local pools=(C2D GMM SFM) each
  full || pools=(GMM)
  for each in "${pools[@]}"; do
    [ -e "$out/pools/$each.npz" ] || bench micro.record_pool "$each" --out "$out/pools/$each.npz" \
      $(full || echo --n 8)
  done
  full || pools=(benchmarks/micro/pools/GMM.npz)
  full && pools=("$out"/pools/*.npz)
  bench micro.cost_model "${pools[@]}" --out "$out/cost_model.json" \
    $(full || echo --repeats 1 --sizes 32)
}
long_runs() {
  bench micro.growth --out "$out/growth.json" $(full || echo --trials 64 --arms)
  bench micro.growth --made-up --tasks "$(full && echo 100 || echo 2)" --out "$out/network.json" \
    --trials $(full && echo 2000 10000 100000 || echo 64)
  bench micro.builder --out "$out/builder.json" $(full || echo --builds 8 --candidates 4)
  bench faults.soak --out "$out/soak.json" --trials "$(full && echo 1000 || echo 32)"
  bench faults.drift "$out/drift" $(full || echo --workloads te:GMM --seeds 0 --trials 16 --rounds 1)
}
many_devices() {
  bench micro.farm --out "$out/farm.json" $(full || echo --devices 1 --candidates 4)
  bench scheduler.scale --out "$out/scale.json" \
    $(full || echo --tasks 2 --trials 64 --devices 1 --lanes 1)
}
first_trial() {
  bench micro.preparation resnet18 $(full && echo mobilenet_v2 transformer) \
    --out "$out/preparation.json"
}

# each_step DO: call DO with the name of each step and the packages that it needs.
each_step() {
  local models=(onnx onnxruntime rapidocr_onnxruntime)
  full && models+=(torch torchvision timm transformers onnxscript)
  "$1" operators
  "$1" first_trials
  "$1" networks
  "$1" ablation
  "$1" peers openvino "${models[@]}"
  "$1" gap openvino "${models[@]}"
  "$1" preparation openvino "${models[@]}"
  "$1" zoo onnx onnxruntime
  "$1" schedulers
  "$1" figures
  "$1" warm_starts
  "$1" starter_records $(full && echo torch torchvision onnx onnxruntime rapidocr_onnxruntime)
  "$1" measuring
  "$1" ranking
  "$1" long_runs
  "$1" many_devices
  "$1" first_trial
}

names=()
remember() { names+=("$1"); }
is_step() {
  local name
  for name in "${names[@]}"; do
    [ "$name" = "$1" ] && return
  done
  return 1
}
each_step remember
for each in "$@"; do
  is_step "$each" || { echo "no step '$each'; steps are ${names[*]}" >&2; exit 2; }
done
mkdir -p "$out"/{logs,data,packed,pools}
each_step step

[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}" >&2; exit 1; }
