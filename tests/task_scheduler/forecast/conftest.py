"""Families of curves: the package's own, and two as a user could add them."""

import math

import numpy as np
import pytest

from tvm_adaptive.task_scheduler.forecast.curve import LOG_POWER, CurveFamily, ShapeParameter

# A limit, and no limit: the two ways in which a ceiling bounds an amplitude.
EXPONENTIAL = CurveFamily(
    "exponential",
    "a (1 - exp(-x / tau)), b = log tau",
    (ShapeParameter("b", lambda n: -1.0, lambda n: math.log(4.0 * max(n, 1)), 48, False),),
    lambda log_x, shape: -np.expm1(-np.exp(log_x - shape[0])),
    saturates=True,
)
LOG_LINEAR = CurveFamily(
    "log-linear",
    "a log x + b, slope = a / b",
    (ShapeParameter("slope", lambda n: 0.005, lambda n: 100.0, 96, median=0.3, log_sd=1.5),),
    lambda log_x, shape: 1.0 + shape[0] * log_x,
)
THETA = {
    "log-power": (1.3, 2.0, 0.8),
    "exponential": (1.3, 3.0),
    "log-linear": (0.35, 0.5),
}


# Of the session, as hypothesis asks of fixtures that its examples share.
@pytest.fixture(
    scope="session", params=[LOG_POWER, EXPONENTIAL, LOG_LINEAR], ids=lambda family: family.name
)
def family(request):
    return request.param


@pytest.fixture(scope="session")
def theta(family):
    return THETA[family.name]


@pytest.fixture(scope="session")
def unlimited():
    return LOG_LINEAR
