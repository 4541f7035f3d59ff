"""Parameter groups by role, and the three optimizers.

The learning rate of a parameter at update k is `lr * lr_scale[role] * schedule(k)`.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ffnlab.errors import UserError

ROLES = ("ffn", "attention", "embedding", "head", "threshold", "gate", "norm")
GATES = (".value_lambdas", ".gate_w", ".scale", ".carry")
GATES += (".router.weight", ".controller.weight", ".controller.bias")


def role_of(name: str) -> str:
    """The role of a parameter, from its name alone (build.py's names, DESIGN 5).

    What an activation learns about its own shape (C, a slope, a beta) is a `threshold`; its norm is a norm. A
    matrix of a skip is an `ffn` matrix: it maps the stream into the stream, and Muon is for such.
    """
    if name.endswith(".threshold"):
        return "threshold"
    if ".act." in name:
        return "norm" if ".norm." in name else "threshold"
    if name.startswith(("embed.", "parts.position.", "parts.value_embeddings.")):
        return "embedding"
    if name.startswith("head."):
        return "head"
    if name.startswith("parts.skip.join_"):
        return "ffn"
    if name.startswith("parts.") or name.endswith(GATES):
        return "gate"
    if ".attn." in name.replace(".residual.attn.", "."):
        return "attention"
    return "norm" if ".residual." in name or name.startswith("norm.") else "ffn"


def decays(name: str, parameter: Tensor) -> bool:
    """Weight decay is for matrices and embeddings: never for thresholds, gates, norms and biases."""
    return parameter.ndim >= 2 and role_of(name) in ("ffn", "attention", "embedding", "head")


class Optimizer:
    """Base: steps one or more torch optimizers whose groups carry `role` and `lr_scale`. State is kept by
    parameter name.
    """

    def __init__(self, model: nn.Module, lr: float, lr_scale: Mapping[str, float]):
        missing, extra = set(ROLES) - set(lr_scale), set(lr_scale) - set(ROLES)
        if missing or extra:
            raise UserError(
                f"optim.lr_scale has {sorted(lr_scale)}; expected one number for each of {', '.join(ROLES)}"
            )
        self.lr, self.lr_scale = lr, dict(lr_scale)
        self.named = dict(model.named_parameters())
        self.optimizers: list[torch.optim.Optimizer] = []

    def groups(self, names: Iterable[str], weight_decay: float) -> list[dict[str, Any]]:
        """One group per (role, decayed or not), in the order of first appearance."""
        found: dict[tuple[str, bool], list[Tensor]] = {}
        for name in names:
            found.setdefault((role_of(name), decays(name, self.named[name])), []).append(self.named[name])
        return [
            {
                "params": params,
                "role": role,
                "lr": self.lr * self.lr_scale[role],
                "weight_decay": weight_decay if decayed else 0.0,
            }
            for (role, decayed), params in found.items()
        ]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def set_factor(self, factor: float) -> None:
        """Multiply every group's own rate with the schedule's factor."""
        for group in self.param_groups:
            group["lr"] = self.lr * self.lr_scale[group["role"]] * factor

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Parameter name -> its state (tensors)."""
        return {
            name: dict(o.state[p]) for o in self.optimizers for name, p in self.named.items() if p in o.state
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """The counterpart of `state_dict`, bit by bit."""
        for optimizer in self.optimizers:
            owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for name, p in self.named.items():
                if id(p) in owned and name in state:
                    optimizer.state[p] = {k: v.to(p.device, copy=True) for k, v in state[name].items()}


class AdamW(Optimizer):
    """Adam with decoupled weight decay (Loshchilov & Hutter, arXiv 1711.05101) for every parameter."""

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        lr_scale: Mapping[str, float],
        weight_decay: float,
        betas: list[float],
        eps: float,
    ):
        super().__init__(model, lr, lr_scale)
        groups = self.groups(self.named, weight_decay)
        self.optimizers = [torch.optim.AdamW(groups, lr=lr, betas=(betas[0], betas[1]), eps=eps, fused=True)]


class SGD(Optimizer):
    """Stochastic gradient descent with momentum for every parameter."""

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        lr_scale: Mapping[str, float],
        weight_decay: float,
        momentum: float,
        nesterov: bool,
    ):
        super().__init__(model, lr, lr_scale)
        groups = self.groups(self.named, weight_decay)
        self.optimizers = [torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov, fused=True)]


class MuonAdamW(Optimizer):
    """Muon for the matrices of attention and FFN, AdamW for all other parameters."""

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        lr_scale: Mapping[str, float],
        weight_decay: float,
        momentum: float,
        nesterov: bool,
        ns_steps: int,
        ns_precision: str,
        betas: list[float],
        eps: float,
    ):
        super().__init__(model, lr, lr_scale)
        matrices = [n for n, p in self.named.items() if p.ndim == 2 and role_of(n) in ("ffn", "attention")]
        others = [n for n in self.named if n not in set(matrices)]
        muon = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
        }
        adamw = torch.optim.AdamW(
            self.groups(others, weight_decay), lr=lr, betas=(betas[0], betas[1]), eps=eps, fused=True
        )
        self.optimizers = [adamw]
        if matrices:
            dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[ns_precision]
            self.optimizers.insert(0, BatchedMuon(self.groups(matrices, weight_decay), dtype, **muon))


class BatchedMuon(torch.optim.Muon):
    """torch.optim.Muon (Jordan et al. 2024), all matrices of a shape orthogonalised at once, in `dtype`.

    m <- momentum m + (1 - momentum) g; u = g + momentum (m - g) if nesterov else m; W <- W (1 - lr wd) - lr
    sqrt(max(1, out/in)) NS(u).
    """

    def __init__(self, params: list[dict[str, Any]], dtype: torch.dtype, **options: Any):
        super().__init__(params, **options)
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault(p.shape, []).append(p)
            for shape, params in by_shape.items():
                self.step_shape(group, shape, params)

    def step_shape(self, group: dict[str, Any], shape: torch.Size, params: list[Tensor]) -> None:
        """One update of matrices (out, in) that all have this shape."""
        grads = [p.grad for p in params if p.grad is not None]
        for p in params:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        momenta = [self.state[p]["momentum_buffer"] for p in params]
        for m, g in zip(momenta, grads, strict=True):
            m.lerp_(g, 1 - group["momentum"])
        pairs = zip(grads, momenta, strict=True)
        updates = torch.stack([g.lerp(m, group["momentum"]) if group["nesterov"] else m for g, m in pairs])
        ortho = orthogonalise(
            updates.to(self.dtype), group["ns_coefficients"], group["ns_steps"], group["eps"]
        )
        rate = group["lr"] * math.sqrt(max(1.0, shape[0] / shape[1]))
        for p, o in zip(params, ortho.to(params[0].dtype), strict=True):
            p.mul_(1 - group["lr"] * group["weight_decay"]).add_(o, alpha=-rate)


def orthogonalise(g: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Newton-Schulz quintic iteration on (N, out, in): X <- a X + (b X X^T + c (X X^T)^2) X, X = G / |G|."""
    a, b, c = coefficients
    tall = g.shape[-2] > g.shape[-1]
    x = g.mT if tall else g
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
