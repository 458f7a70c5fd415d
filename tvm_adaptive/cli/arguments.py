"""Options that commands share, and the parsing of their values."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping

from tvm_adaptive.tuning.config import TuneConfig, replaced
from tvm_adaptive.tuning.target import FARM_RUNNERS

WHAT_HELP = (
    "a model of your own, as net.onnx, net.pt2 (torch.export.save), net.json (Relax, "
    "tvm.ir.save_json) or package.module:factory; resnet18, resnet34, resnet50, "
    "squeezenet1_1, mobilenet_v2, vgg16, transformer or bert_base; or te:C2D and its like"
)


def parse_duration(text: str) -> float:
    """Return the seconds of ``"90s"``, ``"10m"``, ``"1.5h"`` or ``"600"``."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
    return _with_unit(text, units, "no duration; write for example 90s, 10m or 1.5h")


def parse_latency(text: str) -> float:
    """Return the milliseconds of ``"5ms"``, ``"800us"`` or ``"0.2s"``."""
    units = {"ms": 1.0, "us": 1e-3, "s": 1e3}
    return _with_unit(text, units, "no latency; write for example 5ms, 800us or 0.2s")


def _with_unit(text: str, units: Mapping[str, float], problem: str) -> float:
    """Return a positive number times its unit."""
    unit = next((unit for unit in units if text.endswith(unit)), None)
    try:
        value = math.nan if unit is None else float(text.removesuffix(unit)) * units[unit]
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is {problem}")
    return value


def parse_shape(text: str) -> tuple[str, tuple[int, ...]]:
    """Return the input's name and the extents of ``"image=1x3x224x224"``; the name may miss."""
    name, _, shape = text.rpartition("=")
    extents = re.split("[x,]", shape)
    if not all(extent.isdecimal() and int(extent) > 0 for extent in extents):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no shape; write for example image=1x3x224x224"
        )
    return name, tuple(int(extent) for extent in extents)


def parse_count(text: str) -> int:
    """Return a number of trials, slots, records or processes."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number; write for example 200")
    return int(text)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a model's input, preparation and target."""
    parser.add_argument(
        "--input-shape",
        action="append",
        default=[],
        type=parse_shape,
        metavar="NAME=SHAPE",
        help="fixes an input whose shape is dynamic, e.g. image=1x3x224x224; once for each",
    )
    parser.add_argument(
        "--inputs",
        metavar="FILE",
        help="arrays by the names of the inputs, written by numpy.savez: they fix the shapes, "
        "and checks and timings of the whole network use them",
    )
    parser.add_argument(
        "--target",
        metavar="T",
        help="cpu (this machine), cuda, or a JSON target, e.g. '{\"kind\": ...}'",
    )
    parser.add_argument("--layout", metavar="NAME", help="auto, keep or NHWC")
    parser.add_argument(
        "--prepack",
        action=argparse.BooleanOptionalAction,
        help="let schedules choose the layout of weights (default: on CPUs)",
    )
    parser.add_argument(
        "--vector-math",
        action=argparse.BooleanOptionalAction,
        help="compute exp, tanh and erf by polynomials (default: on CPUs)",
    )
    parser.add_argument(
        "--forms",
        action=argparse.BooleanOptionalAction,
        help="let convolutions compete in forms with fewer operations (default: with channels "
        "last on CPUs, under the default task scheduler)",
    )


def add_farm_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of an RPC tracker."""
    parser.add_argument(
        "--tracker",
        metavar="HOST:PORT",
        help="measure on the devices behind an RPC tracker (--runner adaptive-rpc)",
    )
    parser.add_argument("--tracker-key", metavar="KEY", help="which of the tracker's devices")


def with_farm(config: TuneConfig, options: argparse.Namespace) -> TuneConfig:
    """Return a configuration with the tracker of the options, if they name one."""
    measure = replaced(config.measure, tracker=options.tracker, tracker_key=options.tracker_key)
    is_farm = options.tracker is not None or options.tracker_key is not None
    runner = "adaptive-rpc" if is_farm and config.runner not in FARM_RUNNERS else None
    return config.replace(measure=measure, runner=runner)
