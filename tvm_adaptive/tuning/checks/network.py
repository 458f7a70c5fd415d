"""The check of a network: outputs and latency beside its framework, or beside the untuned one."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tvm_adaptive._tvm import Database, IRModule, save_json, workload_key
from tvm_adaptive.errors import (
    InvalidOptionError,
    MachineError,
    WorkerError,
    WorkerTaskError,
    as_invalid_option,
    summary_line,
)
from tvm_adaptive.models import (
    Coverage,
    Network,
    Prepared,
    largest_difference,
    run_exported,
    try_exported,
)
from tvm_adaptive.models.compare_calls import ComparedCalls
from tvm_adaptive.models.compile import (
    Exported,
    device_kind,
    export_module,
    schedule_network,
)
from tvm_adaptive.models.frontend.load import slug
from tvm_adaptive.models.prepare import fastest_forms_of, in_forms
from tvm_adaptive.models.run import time_exported
from tvm_adaptive.models.weights import save_module
from tvm_adaptive.tuning.budget import EndCosts
from tvm_adaptive.tuning.checks.difference import MOST_SEC, source_of_difference
from tvm_adaptive.tuning.checks.framework import FrameworkReference
from tvm_adaptive.tuning.checks.functions import (
    compare_functions,
    compared_outputs,
    names_by_workload,
    steps_in_library,
    verdict_on,
)
from tvm_adaptive.tuning.checks.library import (
    UNTUNED_SHARE,
    FunctionCheck,
    LibraryCheck,
    Measurement,
    coverage_of_earlier,
    key_of_record,
)
from tvm_adaptive.tuning.checks.peers import Rivals
from tvm_adaptive.tuning.checks.untuned import UntunedBuild, tuned_margin
from tvm_adaptive.tuning.manifest import MANIFEST_FILE
from tvm_adaptive.tuning.native import identifier_of
from tvm_adaptive.tuning.outcome import Comparison
from tvm_adaptive.tuning.session import RunContext, Session
from tvm_adaptive.values.agreement import outputs_problem
from tvm_adaptive.values.forms import NO_FORM
from tvm_adaptive.workers.scratch import ScratchFolder

# Nobody runs an untuned network that takes longer; with loading it.
_SLOW_RUN_SEC = 10.0
# Load the tuned network and run it once, if loading the untuned one was not timed.
_LOAD_SEC = 2.0
# Two networks run in turns, and each output is compared: that takes as long again as the run.
_CHECK_MARGIN = 2.0
# A check that takes so many times as long, and at least these seconds, has met a function
# that hangs.
_HANG_MARGIN = 3.0
_LEAST_HANG_SEC = 10.0
# Of those seconds, what may be spent to see what the untuned network rounds. Each function that
# it explains saves a play-off, which takes a second or more.
_ROUNDING_SHARE = 0.3
# Saving, packing, writing and linking weights: with 97 MB, 3.3 s of ResNet-18's compilation, with
# 160 MB 7 s on a disk that takes 270 MB/s.
_SEC_PER_WEIGHT_BYTE = 3e-8
# The share of the remaining budget that the first untuned inference may take where the framework
# is the reference. Functions are checked against another one at the end; without it each needs
# a play-off, for which a short budget has no time: ResNet-18 with 30 s stayed half untuned.
_REFERENCE_SHARE = 0.25


class NetworkCheck(LibraryCheck):
    """Compile, run and time a network before and after its search."""

    def __init__(self, context: RunContext, network: Network, prepared: Prepared) -> None:
        super().__init__(context)
        self._prepared = prepared
        packed = ", weights packed" if prepared.prepack else ""
        self.preparation = f", layout {prepared.layout}{packed}"
        if prepared.alternatives is not None:
            self.forms = prepared.alternatives.keys
        self._network = network
        self._inputs = network.inputs(context.seed)
        self._device_kind = device_kind(context.target)
        self._framework = FrameworkReference(context, network, self._inputs, is_here=self._is_here)
        self._before: Measurement | None = None  # untuned
        self._compiling: UntunedBuild | None = None
        self._compile_sec = 0.0  # of the untuned functions, without writing the weights
        self._load_sec = _LOAD_SEC
        # Names of networks do not begin with a dot.
        self._path = context.work_dir / f"{slug(network.name)}{self._suffix}"
        # Where the result may be: a farm's device links what was compiled.
        self._results = (self._path, self._path.with_suffix(".so"))
        # Under a name of its own until each function in it is checked.
        self._unchecked = context.work_dir / f".unchecked{self._suffix}"
        self._compiled: frozenset[str] = frozenset()  # the records in it
        self._has_result = False  # of this check, in the place of an earlier one
        self._objects: ScratchFolder | None = None  # of the functions compiled so far
        # The functions that take the place of one in the tuned library, by its name.
        self._steps: dict[str, tuple[str, ...]] = {}
        # Kept until there is a tuned one: a run always ends with a library.
        self._untuned = context.work_dir / f".untuned{self._suffix}"

    def without_forms(self) -> None:
        """Compute everything in its direct form from now on."""
        super().without_forms()
        self._prepared = dataclasses.replace(self._prepared, alternatives=None)
        self._steps = {}
        self._compiled, self.library = frozenset(), None
        if not self._keeps_earlier:
            for path in self._results:  # its outputs disagree
                path.unlink(missing_ok=True)

    @property
    def _later_run_sec(self) -> float:
        return self._load_sec + self._framework.reserve_sec

    def end_costs(self) -> EndCosts:
        """Return the seconds that ``measure_tuned`` takes, with timing of frameworks."""
        costs, alternatives = super().end_costs(), self._prepared.alternatives
        tuned_sec = tuned_margin(self._context.target) * self._compile_sec
        n_bytes = {} if alternatives is None else alternatives.weight_bytes
        return dataclasses.replace(
            costs,
            later_sec=costs.least_later_sec + tuned_sec,
            margin_sec=costs.margin_sec + self._framework.reserve_sec,
            network_check_sec=self._network_check_sec,
            weight_secs={name: _SEC_PER_WEIGHT_BYTE * n for name, n in n_bytes.items()},
        )

    @property
    def _network_check_sec(self) -> float | None:
        """Seconds of a check of all functions within the network; None if it is impossible."""
        if self._before is None or not self._is_here:
            return None
        run_sec = 0.0 if math.isnan(self._before.latency_sec) else self._before.latency_sec
        return self._load_sec + _CHECK_MARGIN * run_sec

    def check_functions(self, database: Database, mods: Sequence[IRModule]) -> list[FunctionCheck]:
        """Compile with a database, and check the functions of ``mods``, which are not tuned."""
        context = self._context
        with context.stage("compile"):
            if not self._compile(database, self._unchecked):
                return [FunctionCheck()] * len(mods)
            self._compiled = frozenset(map(key_of_record, database.get_all_tuning_records()))
        with context.stage("check"):
            try:
                found = self._compare_functions()
            except WorkerError as error:
                context.journal.write("error", where="network check", message=str(error))
                return [FunctionCheck()] * len(mods)
        return [self._verdict(mod, found) for mod in mods]

    def _compare_functions(self) -> ComparedCalls:
        """Compare the functions of the library to check with those of the untuned one."""
        inputs = self._network.telling_inputs(self._context.seed)
        budget, check_sec = self._context.budget, self._network_check_sec or 0.0
        # If nothing is compiled again.
        spare_sec = budget.left_sec - budget.least_later_sec - check_sec
        most_sec = max(_LEAST_HANG_SEC, _HANG_MARGIN * check_sec)
        start_sec = time.perf_counter()
        found = self._compared(
            self._unchecked,
            inputs,
            most_sec=most_sec,
            rounding_sec=min(_ROUNDING_SHARE * most_sec, spare_sec),
            in_overtime=True,
        )
        self._context.journal.write(
            "network-check",
            n_functions=len(compared_outputs(self._prepared.mod, self._steps)),
            n_compared=len(found.n_compared),
            problems=found.problems,
            unclear=found.unclear,
            seconds=time.perf_counter() - start_sec,
        )
        return found

    def _compared(self, library: Path, inputs: Sequence[Any], **options: Any) -> ComparedCalls:
        """Compare the functions of a library with those of the untuned one."""
        parts = self._context, self._pool, self._prepared
        builds = (str(self._untuned), str(library)), inputs, self._device_kind
        return compare_functions(*parts, builds, self._steps, **options)

    def _verdict(self, mod: IRModule, found: ComparedCalls) -> FunctionCheck:
        """Return what was found of the functions of one task."""
        return verdict_on(self._names.get(workload_key(mod), ()), self.covered, found)

    @functools.cached_property
    def _names(self) -> dict[str, list[str]]:
        """The names of the functions of each task, by its workload's key."""
        return names_by_workload(self._prepared)

    def begin_untuned(self) -> None:
        """Start to compile the network without tuning; ``measure_untuned`` waits for it."""
        # Where the framework is timed, the untuned network is only compared with.
        self._compile_untuned(quick=self._framework.has_rivals)

    def _compile_untuned(self, *, quick: bool) -> UntunedBuild:
        with as_invalid_option(f"TVM cannot compile {self._prepared.name}"):
            parts = self._context, self._prepared, self._untuned
            self._compiling = UntunedBuild(*parts, quick=quick)
        self._set_coverage(self._compiling.coverage)
        return self._compiling

    @property
    def may_give_up_forms(self) -> bool:
        """Whether forms may be why outputs disagree, and not the rounding of the network."""
        return super().may_give_up_forms and not self._framework.may_round

    def __exit__(self, *exception: object) -> None:
        if self._compiling is not None:
            self._compiling.close()
        self._framework.close()
        super().__exit__(*exception)
        self._remove_others()
        if self._objects is not None:
            self._objects.remove()

    def measure_untuned(self) -> None:
        """Compile the network untuned and check its import; without a framework, time it, too."""
        context = self._context
        with context.stage("untuned"):
            if context.budget.left_sec > 0 and not context.budget.interrupted:
                self._framework.run()
            if context.budget.interrupted:
                return
            has_reference = self._framework.replaces_untuned
            build = self._compiling or self._compile_untuned(quick=has_reference)
            if build.is_quick and not has_reference:  # its latency is what is improved on
                build.close()
                build = self._compile_untuned(quick=False)
            outcome = build.result()
            # What has interrupted the run may have ended its workers, too.
            if outcome is None or context.budget.interrupted:
                return
            if isinstance(outcome.error, MachineError):
                raise outcome.error
            exported: Exported | None = outcome.value
            if exported is None or exported.refused:
                reasons = [] if exported is None else map(": ".join, exported.refused.items())
                reason = next(iter(reasons), "") or summary_line(outcome.error or "")
                raise InvalidOptionError(f"TVM cannot compile {self._prepared.name}: {reason}")
            self._compile_sec = exported.compile_sec
            # The latter with writing the weights, the former with what a quick one has saved.
            self._build_sec = max(exported.compile_sec, outcome.elapsed_sec)
            self._before = self._measure_untuned()
        if self._before is None:
            return
        if not has_reference:
            context.journal.write("untuned", seconds=self._before.latency_sec)
            context.observer.note(f"untuned: {self._before.latency_sec * 1e3:.2f} ms")
        self._framework.check_import(self._before.outputs)

    def _measure_untuned(self) -> Measurement | None:
        """Run the untuned network; time it if it is the reference."""
        has_reference = self._framework.replaces_untuned
        share = _REFERENCE_SHARE if has_reference else UNTUNED_SHARE
        most_sec, late = share * self._context.budget.left_sec, None
        if has_reference or (self._is_here and most_sec > _SLOW_RUN_SEC):
            most_sec = min(most_sec, _SLOW_RUN_SEC)
            late = self._report_slow
        run = functools.partial(try_exported, min_seconds=0.0 if has_reference else 0.5)
        task = (str(self._untuned), self._inputs, self._device_kind)
        start_sec = time.perf_counter()
        found = self._run(run, task, self._untuned, most_sec, late)
        if found is None:
            return None
        outputs, latency_sec = found
        # The worker has also started TVM, and the network has run once more to be timed.
        self._load_sec = max(0.0, time.perf_counter() - start_sec - latency_sec)
        return Measurement(outputs, latency_sec if latency_sec > 0 else math.nan, self._device)

    def _report_slow(self, most_sec: float) -> None:
        text = f"untuned, an inference takes more than {most_sec:.0f} s"
        if self._framework.expected is not None:
            text += f"; outputs are first compared with {self._framework.name} after tuning"
            self._context.observer.note(text)
            self._context.journal.write("error", where=self._untuned.name, message=text)
        else:
            self._report_shortfall(f"{text}, and no other reference is there", "")

    def measure_tuned(self, database: Database) -> Comparison | None:
        """Compile with a database; compare with the framework, or with the untuned network."""
        context, path = self._context, self._path
        if context.budget.interrupted:
            has_given_up = self.is_direct and self._untuned.is_file()  # the tuned one
            if has_given_up and not self._keeps_earlier:
                self._use_untuned()
                self.library = self._linked(path)
            else:  # what was compiled to be checked is no result
                self.coverage = self._earlier_coverage() or ""
            self._remove_others()
            return None
        with context.stage("compile"):
            has_records = self._has_records(database)
            self.is_compiled = has_records or self._compile(database, self._unchecked)
            is_held = self.is_compiled and self._keeps_earlier
            if self.is_compiled and not is_held:
                self._use(self._unchecked)
        with context.stage("compare"):
            if not self.is_compiled:
                self._use_earlier_or_untuned()
            # An untuned library is compared with a framework only, and if it is quick.
            is_comparable = self.is_compiled or (
                self._framework.replaces_untuned and self._before is not None
            )
            self.run_failure = ""
            library = self._unchecked if is_held else path
            comparison = self._compare_tuned(library) if is_comparable else None
            if is_held:
                wrong = "" if comparison is None else comparison.problem
                self.failure = self.run_failure or wrong
                if not self.failure:
                    self._use(self._unchecked)
            if comparison is not None and self._is_here:
                self._write_roofline()
            self.library = self._linked(path)
        if comparison is None or comparison.agree or not self.may_give_up_forms:
            self._remove_others()
        if comparison is not None:
            context.journal.write("comparison", **dataclasses.asdict(comparison))
        return comparison

    @property
    def _keeps_earlier(self) -> bool:
        """Whether an earlier call's library, which may be in use, stays until another was tried.

        One that crashes or disagrees does not replace it; one that no device could run does.
        """
        is_there = any(path.is_file() for path in self._results)
        return is_there and not (self._has_result or isinstance(self._context, Session))

    def _use(self, library: Path) -> None:
        """Put a library in the place of the result, whole: what was there may be in use."""
        # First: after a kill in between, what was not compared must not count as what was.
        self._context.journal.write("library", tuned=library == self._unchecked)
        self._forget_description(MANIFEST_FILE, f"{identifier_of(self._path.name)}.h")
        os.replace(library, self._path)
        self._has_result = True

    def _use_untuned(self) -> None:
        """Let the untuned library be the result."""
        self._use(self._untuned)
        self._steps = {}
        if self._compiling is not None:
            self._set_coverage(self._compiling.coverage)

    def _has_records(self, database: Database) -> bool:
        """Say whether the library of the check was compiled with the same records."""
        records = database.get_all_tuning_records()
        return bool(records) and self._compiled == frozenset(map(key_of_record, records))

    def _earlier_coverage(self) -> str | None:
        """Return what is tuned in an earlier library that stays; None if none does."""
        context = self._context
        if not any(path.is_file() for path in self._results):
            return None
        if not isinstance(context, Session):  # without a new one, apply ends with an error
            return self.coverage
        return coverage_of_earlier(context) or None

    def _what_is_left(self) -> str:
        kind = "untuned" if self._earlier_coverage() is None else "earlier"
        return f"the library is the {kind} one"

    def _use_earlier_or_untuned(self) -> None:
        coverage = self._earlier_coverage()  # of now: a kernel may have been refused since
        if coverage is None:
            self._use_untuned()
        else:
            self.coverage = coverage

    def _remove_others(self) -> None:
        """Remove the libraries beside the result."""
        for path in (self._untuned, self._unchecked):
            path.unlink(missing_ok=True)

    def _compare_tuned(self, library: Path) -> Comparison | None:
        """Run the tuned network, and time it in turns with the frameworks."""
        path, task = self._path, (str(library), self._inputs, self._device_kind)
        outputs = self._run(run_exported, task, path)
        if outputs is None:
            return None
        framework, expected = "", None if self._before is None else self._before.outputs
        if self._framework.expected is not None:
            framework, expected = self._framework.name, self._framework.expected
        if expected is None:
            return None
        problem = self._problem(outputs, expected, framework)
        rivals, secs, before_sec = self._framework.rivals(), [], math.inf
        # What gives up its forms makes another library, for which the seconds are.
        if not (problem and self.may_give_up_forms):
            secs = rivals.time(outputs, lambda sec: self._run(time_exported, (*task, sec), path))
            # It has crashed after some rounds.
            if not problem and self.run_failure:
                return None
            before_sec = self._before_sec(rivals, framework)
            if problem:
                problem = f"{problem}; {self._source_of_problem(library)}"
        if not secs and not problem:  # why it was not timed is reported
            return None
        return Comparison(
            before_sec,
            statistics.median(secs) if secs else math.inf,
            *largest_difference(outputs, expected),
            not problem,
            framework,
            tuple(rivals.timings),
            problem,
        )

    def _before_sec(self, rivals: Rivals, framework: str) -> float:
        """Return the latency to compare with: the framework's, or the untuned network's."""
        if framework and self._framework.has_rivals:
            return self._framework.latency_sec(rivals)
        before = self._before
        return math.inf if before is None or before.device != self._device else before.latency_sec

    def _problem(self, outputs: Sequence[Any], expected: Sequence[Any], framework: str) -> str:
        """Say where the tuned network's outputs are wrong; "" if they are right."""
        if framework:
            return self._framework.problem(outputs, expected) or ""
        rtol, names = self._context.config.finish.rtol, self._network.output_names
        return outputs_problem(outputs, expected, rtol, names=names) or ""

    def _source_of_problem(self, path: Path) -> str:
        """Say which function of a library its wrong outputs come from."""
        if not self._untuned.is_file():
            return "no function is tuned"
        compare = functools.partial(self._compared, path, self._inputs, most_sec=MOST_SEC)
        tuned = self.covered.tuned
        return source_of_difference(self._context, compare, self._prepared, tuned=tuned)

    def _compile(self, database: Database, path: Path) -> bool:
        """Compile the tuned network; return False, and report why, if there is no library."""
        context = self._context
        try:
            if not self._compiled:  # else most of it is compiled
                self._check_time()
            forms = fastest_forms_of(self._prepared, database, context.target)
            coverage = self._export(in_forms(self._prepared, forms), database, path)
            if coverage is None:
                return False
        except Exception as error:
            self._report_uncompiled(self._path, error, f"; {self._what_is_left()}")
            return False
        self.failure = ""
        self._set_coverage(coverage)
        if self._prepared.alternatives is not None:
            steps = self._prepared.alternatives.steps(forms)
            self._steps = steps_in_library(steps, self._names.values(), coverage.functions)
        context.journal.write("coverage", **dataclasses.asdict(coverage))
        return True

    def _export(self, prepared: Prepared, database: Database, path: Path) -> Coverage | None:
        """Compile without what the compiler refuses; return None if there is nothing to compile.

        What was compiled for an earlier library is not compiled again.
        """
        context, refused = self._context, dict[str, str]()
        if self._objects is None:
            self._objects = ScratchFolder("objects", context.work_dir)
        while True:
            mod, coverage = schedule_network(
                prepared, database, context.target, refused=refused, check=self._check_overtime
            )
            if refused and not coverage.tuned:
                raise WorkerTaskError("; ".join(refused.values()))
            if not coverage.tuned and context.budget.seconds is not None:
                if coverage.fallback:
                    # Where time is left, notes have said what did not pass.
                    cause = "" if context.budget.spare_sec > 0 else "the budget is short: "
                    self._report_shortfall(f"nothing is tuned; {self._what_is_left()}", cause)
                if not (self._compiling and self._compiling.is_quick):
                    return None
            with ScratchFolder("network", context.work_dir) as folder:
                save_module(mod, folder)
                task = (str(folder), save_json(context.target), str(path), str(self._objects.path))
                exported: Exported = self._compile_tuned(export_module, task)
            if not exported.refused:
                return coverage
            problems = {
                name: f"{name} cannot be compiled: {why}" for name, why in exported.refused.items()
            }
            text = "; ".join(problems.values())
            if not problems.keys() & coverage.tuned.keys():
                raise WorkerTaskError(text)
            context.journal.write("error", where="compile", message=text)
            refused |= problems

    def _set_coverage(self, coverage: Coverage) -> None:
        self.coverage = coverage.summary()
        self.covered = coverage
        self.uses_forms = any(self.forms.get(name, NO_FORM).form for name in coverage.tuned)
