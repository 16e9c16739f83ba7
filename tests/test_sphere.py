"""The kernels two ways: closed forms against mpmath, scipy, quadrature, Monte Carlo and a published package."""

import itertools
import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from power_spherical import PowerSpherical as Published
from scipy import stats

from bachlib import BachError
from bachlib.bench.model import exact_log_normalizer
from bachlib.model.sphere import KERNELS

mpmath.mp.dps = 50
PS, VMF = KERNELS["power-spherical"], KERNELS["von-mises-fisher"]
DIMENSIONS = [2, 3, 4, 5, 8, 16, 31, 48, 50, 51, 64, 128, 256, 512, 1024, 4096]
KAPPAS = [0.0, *np.geomspace(1e-4, 1e4, 33).tolist()]


@pytest.fixture(params=list(KERNELS))
def kernel(request):
    return KERNELS[request.param]


@pytest.mark.parametrize("d", DIMENSIONS)
def test_log_normalizer_against_mpmath(kernel, d):
    exact = [exact_log_normalizer(kernel.name, kappa, d) for kappa in KAPPAS]
    found = kernel.log_normalizer(torch.tensor(KAPPAS, dtype=torch.float64), d)
    assert max(abs(float(mpmath.mpf(f.item()) - e)) for f, e in zip(found, exact, strict=True)) < (
        1e-10 if d <= 1024 else 1e-9
    )

    single = torch.tensor(KAPPAS, dtype=torch.float32)
    exact = torch.tensor(
        [float(exact_log_normalizer(kernel.name, kappa.item(), d)) for kappa in single], dtype=torch.float64
    )
    assert ((kernel.log_normalizer(single, d).double() - exact).abs() / exact.abs().clamp(min=1)).max() < 5e-7


@pytest.mark.parametrize("d", [2, 3, 10, 64])
def test_vmf_against_scipy(d):
    direction = np.eye(d)[0]
    x = np.r_[0.3, np.zeros(d - 2), math.sqrt(1 - 0.09)]
    for kappa in (0.5, 5.0, 50.0):
        expected = stats.vonmises_fisher(direction, kappa).logpdf(x)
        found = VMF.log_density(torch.tensor(0.3, dtype=torch.float64), torch.tensor(kappa).double(), d)
        assert found.item() == pytest.approx(expected, abs=1e-10)
        entropy = stats.vonmises_fisher(direction, kappa).entropy()
        assert VMF.entropy(torch.tensor(kappa).double(), d).item() == pytest.approx(entropy, abs=1e-9)


@pytest.mark.parametrize("d", [2, 3, 16, 64])
def test_power_spherical_against_the_published_package(d):
    torch.manual_seed(0)
    mean, x = (torch.nn.functional.normalize(torch.randn(5, d, dtype=torch.float64), dim=-1) for _ in range(2))
    kappa = torch.tensor([0.1, 1.0, 10.0, 14.3, 100.0], dtype=torch.float64)
    for n in range(5):
        published = Published(mean[n], kappa[n])
        assert torch.allclose(PS.log_density(mean[n] @ x[n], kappa[n], d), published.log_prob(x[n]), atol=1e-9)
        assert torch.allclose(PS.entropy(kappa[n], d), published.entropy(), atol=1e-8)
        assert torch.allclose(PS.mean_resultant(kappa[n], d), published.mean @ mean[n], atol=1e-10)


def moments(kernel, kappa, d):
    """∫ p, E[t], −E[log p] by quadrature over the angle θ, whose density is p(cos θ) · area(S^{d−2}) sin^{d−2} θ."""
    area = math.log(2) + (d - 1) / 2 * math.log(math.pi) - math.lgamma((d - 1) / 2)
    kappa = torch.tensor(kappa, dtype=torch.float64)

    nodes, weights = np.polynomial.legendre.leggauss(400)
    parts = list(itertools.pairwise([0, 0.02, 0.1, 0.5, 1.5, math.pi]))
    theta = np.concatenate([(b - a) / 2 * nodes + (a + b) / 2 for a, b in parts])
    log_p = kernel.log_density(torch.from_numpy(np.cos(theta)), kappa, d).numpy()
    mass = np.exp(log_p + area) * np.sin(theta) ** (d - 2) * np.concatenate([(b - a) / 2 * weights for a, b in parts])
    return mass.sum(), mass @ np.cos(theta), -(mass @ log_p)


@pytest.mark.parametrize("d", [2, 3, 8, 64, 128])
@pytest.mark.parametrize("kappa", [0.0, 1.0, 14.3, 300.0])
def test_integral_mean_and_entropy_by_quadrature(kernel, d, kappa):
    total, mean, entropy = moments(kernel, kappa, d)
    at = torch.tensor(kappa, dtype=torch.float64)
    assert total == pytest.approx(1, abs=1e-8)
    assert kernel.mean_resultant(at, d).item() == pytest.approx(mean, abs=1e-8)
    assert kernel.entropy(at, d).item() == pytest.approx(entropy, abs=1e-6)


@pytest.mark.parametrize("d", [2, 3, 16, 256])
@pytest.mark.parametrize("kappa", [0.0, 5.0, 200.0])
def test_samples(kernel, d, kappa):
    torch.manual_seed(d)
    mean = torch.nn.functional.normalize(torch.randn(d, dtype=torch.float64), dim=-1)
    draws = kernel.sample(mean.expand(20_000, d), torch.full((20_000,), kappa, dtype=torch.float64))
    assert torch.allclose(draws.norm(dim=-1), torch.ones(()).double(), atol=1e-6)
    t = (draws @ mean).numpy()
    expected = kernel.mean_resultant(torch.tensor(kappa).double(), d).item()
    assert abs(t.mean() - expected) < 5 * t.std() / math.sqrt(len(t))
    grid = np.cos(np.linspace(math.pi, 0, 8001))
    log_p = kernel.log_density(torch.from_numpy(grid), torch.tensor(kappa).double(), d).numpy()
    with np.errstate(divide="ignore"):
        density = np.exp(log_p - log_p.max() + (d - 2) / 2 * np.log(np.clip(1 - grid**2, 1e-300, None)))  # per angle
    cdf = np.cumsum(density) / density.sum()
    assert stats.kstest(t, lambda x: np.interp(x, grid, cdf)).pvalue > 1e-3


def test_gradients_against_finite_differences(kernel):
    for d in (2, 3, 16, 64):
        kappa = torch.tensor([1e-3, 0.5, 3.0, 14.3, 80.0], dtype=torch.float64, requires_grad=True)
        t = torch.tensor([-0.9, -0.2, 0.0, 0.5, 0.99], dtype=torch.float64, requires_grad=True)

        def density(t, kappa, d=d):
            return kernel.log_density(t, kappa, d)

        assert torch.autograd.gradcheck(density, (t, kappa), eps=1e-6, atol=1e-6)
        assert torch.autograd.gradgradcheck(density, (t, kappa), eps=1e-6, atol=1e-5)


def test_the_derivative_is_minus_the_mean_resultant_for_vmf():
    kappa = torch.tensor(KAPPAS, dtype=torch.float64, requires_grad=True)
    for d in DIMENSIONS:
        (slope,) = torch.autograd.grad(VMF.log_normalizer(kappa, d).sum(), kappa)
        assert torch.allclose(-slope, VMF.mean_resultant(kappa, d), atol=1e-14)
        exact = [mpmath.besseli(mpmath.mpf(d) / 2, k) / mpmath.besseli(mpmath.mpf(d) / 2 - 1, k) for k in KAPPAS[1:]]
        assert max(abs(float(-s.item() / e - 1)) for s, e in zip(slope[1:], exact, strict=True)) < 1e-10


@pytest.mark.parametrize("d", [2, 3, 49, 50, 51, 64, 1024])
def test_no_jump_in_the_derivative(kernel, d):
    """On a fine grid neighbouring slopes differ by what the curvature says and by nothing else."""
    kappa = torch.logspace(-6, 6, 20_001, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(kernel.log_normalizer(kappa, d).sum(), kappa, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), kappa)
    step = kappa.diff()
    expected = (bend[1:] + bend[:-1]) / 2 * step
    assert ((slope.diff() - expected).abs() <= 1e-3 * expected.abs() + 1e-8).all()


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(list(KERNELS)),
    d=st.integers(2, 2000),
    kappa=st.one_of(st.floats(0, 1e6), st.sampled_from([0.0, 1e-30, 1e6])),
    t=st.one_of(st.floats(-1, 1), st.sampled_from([-1.0, 1.0, -1.0000001, 1.0000001, 1.0000004])),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_finite_everywhere(name, d, kappa, t, dtype):
    t = torch.tensor(t, dtype=dtype, requires_grad=True)
    kappa = torch.tensor(kappa, dtype=dtype, requires_grad=True)
    value = KERNELS[name].log_density(t, kappa, d)
    slopes = torch.autograd.grad(value, (t, kappa))
    assert value.dtype == dtype and torch.isfinite(value) and all(torch.isfinite(s) for s in slopes)
    assert torch.isfinite(KERNELS[name].entropy(kappa, d)) and 0 <= KERNELS[name].mean_resultant(kappa, d) <= 1


def test_float32_densities_are_as_exact_as_their_inputs(kernel):
    for d in (2, 64, 1024):
        for kappa in (0.0, 1.0, 14.3, 1e4, 1e6):
            t = torch.linspace(-0.99, 1, 101)
            given = torch.full_like(t, kappa)
            exact = kernel.log_density(t.double(), given.double(), d)
            found = kernel.log_density(t, given, d).double()
            assert ((found - exact).abs() / exact.abs().clamp(min=1)).max() < 5e-7


def test_entropy_can_be_differentiated_twice(kernel):
    kappa = torch.tensor([0.05, 0.5, 3.0, 30.0], dtype=torch.float64, requires_grad=True)
    for d in (2, 8, 64):
        assert torch.autograd.gradcheck(lambda x, d=d: kernel.entropy(x, d), kappa, atol=1e-6)
        assert torch.autograd.gradgradcheck(lambda x, d=d: kernel.entropy(x, d), kappa, atol=1e-5)
        assert torch.autograd.gradgradcheck(lambda x, d=d: kernel.mean_resultant(x, d), kappa, atol=1e-5)


def test_samples_broadcast_and_are_their_own(kernel):
    many = kernel.sample(torch.eye(8)[0], torch.full((500,), 5.0))
    assert many.shape == (500, 8) and len(many[:, 0].unique()) > 450 and len(many[:, 1].unique()) > 450
    many = kernel.sample(torch.eye(8)[0].expand(500, 8), torch.tensor(5.0))
    assert many.shape == (500, 8) and len(many[:, 0].unique()) > 450
    assert kernel.sample(torch.zeros(0, 8), torch.ones(0)).shape == (0, 8)
    flat = kernel.sample(torch.eye(2)[0].expand(50_000, 2), torch.tensor(1e6))
    assert flat.isfinite().all() and (flat.norm(dim=-1) - 1).abs().max() < 1e-6


def test_uniform_at_zero(kernel):
    for d in DIMENSIONS:
        area = math.log(2) + d / 2 * math.log(math.pi) - math.lgamma(d / 2)
        assert kernel.log_normalizer(torch.zeros(()).double(), d).item() == pytest.approx(-area, abs=1e-10)


def test_any_shape(kernel):
    kappa = torch.rand(2, 3, 4)
    assert kernel.log_normalizer(kappa, 8).shape == (2, 3, 4)
    assert kernel.log_density(torch.zeros(2, 3, 4), kappa, 8).shape == (2, 3, 4)
    assert kernel.sample(torch.eye(8)[:3], torch.ones(3)).shape == (3, 8)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda k: k.log_normalizer(torch.tensor([1.0, -2.0]), 8),
            "kappa should be finite and ≥ 0 everywhere; got -2.0",
        ),
        (
            lambda k: k.log_normalizer(torch.tensor([1.0, math.nan]), 8),
            "kappa should be finite and ≥ 0 everywhere; got nan",
        ),
        (lambda k: k.log_normalizer(torch.tensor([1.0]), 1), "d should be a whole number ≥ 2.*got 1"),
        (
            lambda k: k.log_normalizer(torch.tensor([1]), 8),
            "kappa should be a float32 or float64 tensor; got a torch.int64",
        ),
        (lambda k: k.log_normalizer(3.0, 8), "kappa should be a float32 or float64 tensor; got float"),
        (lambda k: k.log_normalizer(torch.tensor([math.inf]), 8), "kappa should be finite and ≥ 0 everywhere; got inf"),
        (
            lambda k: k.log_density(torch.zeros(3), torch.ones(4), 8),
            r"t and kappa should broadcast; got \(3,\) and",
        ),
        (lambda k: k.sample(2 * torch.eye(8), torch.ones(8)), "mean should be unit vectors.*got one of length 2"),
        (lambda k: k.sample(torch.eye(8), torch.ones(3)), r"got mean \(8, 8\) and kappa \(3,\)"),
        (lambda k: k.sample(torch.eye(8), torch.full((8,), 1e20)), "kappa should be at most 1e15 for sampling"),
        (lambda k: k.log_density(torch.tensor([1.5]), torch.tensor([1.0]), 8), "t should be a cosine.*got 1.5"),
    ],
)
def test_errors_name_argument_expected_and_got(kernel, call, said):
    with pytest.raises(BachError, match=said):
        call(kernel)
