"""Families of learning curves: best throughput against trials, never falling.

=========  ==============================================================  ===========
symbol     meaning                                                         unit
=========  ==============================================================  ===========
x          trials so far, counted from 1                                   count
f(x)       best throughput after x trials, amplitude * g(x; shape)         as the data
g(x)       the basis, all of f but its amplitude                           none
=========  ==============================================================  ===========

Families are linear in their amplitude: given the shape, the best amplitude is a least-squares
quotient and its posterior is known in closed form.

References
----------
Zhang, Li, Wang & Li (2021), "DynaTune: Dynamic Tensor Program Optimization in Deep Neural
Network Compilation", ICLR, section 4.3. Domhan, Springenberg & Hutter (2015), "Speeding
up Automatic Hyperparameter Optimization of Deep Neural Networks by Extrapolation of
Learning Curves", IJCAI, table 1. Golub & Pereyra (1973), "The differentiation of
pseudo-inverses and nonlinear least squares problems whose variables separate", SIAM J.
Numer. Anal. 10.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tvm_adaptive.values.trial import FloatArray

# No basis value is below: it is a divisor, and a curve that starts lower is zero anyway.
_MIN_BASIS = 1e-9
# exp of more overflows a double; the basis has long reached its limit there.
_MAX_EXPONENT = 500.0


@dataclasses.dataclass(frozen=True)
class ShapeParameter:
    """One parameter of a curve's shape, its range and its prior.

    Attributes
    ----------
    name : str
    lower, upper : callable of the number of trials n
        The range.
    n_nodes : int
        Nodes that a grid places in the range.
    logarithmic : bool
        Whether the nodes are even in the logarithm.
    median, log_sd : float
        Of the log-normal prior; with a ``median`` of 0 the prior is even over the
        nodes: uniform, or uniform in the logarithm.
    """

    name: str
    lower: Callable[[int], float]
    upper: Callable[[int], float]
    n_nodes: int
    logarithmic: bool = True
    median: float = 0.0
    log_sd: float = 1.0

    def nodes(self, n_trials: int) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Return the nodes, the logarithms of their volumes and of their prior weights.

        Of shape (n_nodes,) each; volumes and weights up to a constant factor.
        """
        lower, upper = self.lower(n_trials), self.upper(n_trials)
        if not self.logarithmic:
            even = np.zeros(self.n_nodes)
            return np.linspace(lower, upper, self.n_nodes), even, even
        log_nodes = np.linspace(math.log(lower), math.log(upper), self.n_nodes)
        log_prior = np.zeros(self.n_nodes)
        if self.median > 0:
            log_prior = -0.5 * ((log_nodes - math.log(self.median)) / self.log_sd) ** 2
        return np.exp(log_nodes), log_nodes, log_prior


@dataclasses.dataclass(frozen=True)
class ShapeGrid:
    """Shapes of a family that together cover its range, an array of shape (s, p).

    ``log_volume``, of shape (s,), is the logarithm of the volume that a shape stands for, its
    weight under a uniform prior; ``log_prior`` that under the weakly informative prior.
    """

    shapes: FloatArray
    log_volume: FloatArray
    log_prior: FloatArray


@dataclasses.dataclass(frozen=True)
class CurveFamily:
    """A family f(x) = amplitude * g(x; shape), increasing in x.

    Attributes
    ----------
    name : str
    formula : str
        As published; symbols in ``parameters``.
    parameters : tuple of ShapeParameter
        Those of the shape, in the order of its columns.
    basis_function : callable of (log x of shape (n,), shapes of shape (p, s, 1))
        Gives g of shape (s, n).
    saturates : bool
        Whether g tends to 1, so that the amplitude is the curve's limit.
    """

    name: str
    formula: str
    parameters: tuple[ShapeParameter, ...]
    basis_function: Callable[[FloatArray, FloatArray], FloatArray] = dataclasses.field(repr=False)
    saturates: bool = False

    def basis(self, x: npt.ArrayLike, shape: npt.ArrayLike) -> FloatArray:
        """Return g(x; shape), positive and not decreasing in x, of shape (n,) or (s, n).

        Parameters
        ----------
        x : array_like of shape (n,)
            Trials, at least 1.
        shape : array_like of shape (p,) or (s, p)
        """
        shapes = np.asarray(shape, dtype=np.float64)
        columns = np.atleast_2d(shapes).T[:, :, None]
        log_x = np.log(np.asarray(x, dtype=np.float64))
        g = np.maximum(self.basis_function(log_x, columns), _MIN_BASIS)
        return np.asarray(g if shapes.ndim == 2 else g[0], dtype=np.float64)

    def evaluate(self, x: npt.ArrayLike, theta: npt.ArrayLike) -> FloatArray:
        """Return f(x), of shape (n,) or (s, n).

        Parameters
        ----------
        x : array_like of shape (n,)
            Trials, at least 1.
        theta : array_like of shape (1 + p,) or (s, 1 + p)
            Amplitude, then shape.
        """
        values = np.asarray(theta, dtype=np.float64)
        return np.asarray(values[..., :1] * self.basis(x, values[..., 1:]), dtype=np.float64)

    def bounds(self, n_trials: int) -> tuple[FloatArray, FloatArray]:
        """Return the shape's lower and upper bounds after ``n_trials``, shape (p,) each."""
        lower = [parameter.lower(n_trials) for parameter in self.parameters]
        upper = [parameter.upper(n_trials) for parameter in self.parameters]
        return np.array(lower), np.array(upper)

    def amplitude_bounds(
        self, last: float, ceiling: float, basis_at_last: npt.ArrayLike
    ) -> tuple[FloatArray, FloatArray]:
        """Return the ranges of amplitudes; ``lower >= upper`` marks an impossible shape.

        Parameters
        ----------
        last : float
            The incumbent: the curve has reached it at the last trial.
        ceiling : float
            The largest limit of the curve, or, without a limit, value at the last trial.
        basis_at_last : array_like of shape (s,)
            g at the last trial.
        """
        g = np.asarray(basis_at_last, dtype=np.float64)
        return last / g, np.full(g.shape, ceiling) if self.saturates else ceiling / g

    def grid(self, n_trials: int) -> ShapeGrid:
        """Return shapes that cover the range after ``n_trials``."""
        axes = [parameter.nodes(n_trials) for parameter in self.parameters]
        shapes, volumes, priors = (
            np.stack([part.ravel() for part in np.meshgrid(*parts, indexing="ij")], axis=-1)
            for parts in zip(*axes, strict=True)
        )
        return ShapeGrid(shapes, volumes.sum(axis=-1), priors.sum(axis=-1))


def _log_power(log_x: FloatArray, shape: FloatArray) -> FloatArray:
    b, h = shape
    exponent = np.clip(h * (b - log_x), -_MAX_EXPONENT, _MAX_EXPONENT)
    return np.asarray(1.0 / (1.0 + np.exp(exponent)))


def _constant(value: float) -> Callable[[int], float]:
    return lambda _: value


LOG_POWER = CurveFamily(
    "log-power",
    "a / (1 + (x / exp(b))^c), h = -c",
    (
        # Half of the limit is reached at exp(b): between a time before the first trial and
        # four times the trials so far, beyond which all curves look alike.
        ShapeParameter("b", _constant(-2.0), lambda n: math.log(4.0 * max(n, 1)), 28, False),
        # Slower than 0.1 is flat over any horizon; steeper than 4 is a step.
        ShapeParameter("h", _constant(0.1), _constant(4.0), 20, median=1.0, log_sd=0.5),
    ),
    _log_power,
    saturates=True,
)
