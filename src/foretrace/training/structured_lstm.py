"""LSTMs with dropout on their inputs and recurrent connections: ordinary, and structured so that products shrink.

    DropoutLSTM(650, 650, 2, p=0.5)              # every element of every sample by itself, redrawn per time step
    StructuredDropoutLSTM(650, 650, 2, p=0.5)    # the same units for all samples of a batch, redrawn per training step

Both compute, per layer and time step t, with x_t of [batch, input] and h, c of [batch, hidden],

    i, f, g, o = (m_t * x_t) W_ih' + (n_t * h_{t-1}) W_hh' + b      c_t = f c_{t-1} + i g      h_t = o tanh(c_t)

with masks m, n that hold 0 or a scale that keeps the expectation. Where a unit is dropped for the whole batch, its
column of W_ih or W_hh meets only zeros: the forward product, the gradient of its input and the gradient of the weights
shrink to the kept columns (Sarma et al., Structured in Space, Randomized in Time, NeurIPS 2021, section 3). Both
modules run the same code with a mask in the place of a selection, so that comparing them compares nothing else.

Parameters have the names and layout of `torch.nn.LSTM`; in evaluation the modules are one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from foretrace.errors import NotApplicableError

CONNECTIONS = ("input", "both")


@dataclass(frozen=True, eq=False, kw_only=True)
class Kept:
    """Units that structured dropout keeps."""

    columns: Tensor  # [spans, kept], int64, ascending: the units kept during each span of time steps
    span: int  # time steps
    scale: float  # units / kept, so that the expectation stays

    def parts(self, time_steps: int) -> Iterator[tuple[Tensor, slice]]:
        """Yield the kept units of every span, and its time steps."""
        for i, columns in enumerate(self.columns.unbind(0)):
            yield columns, slice(i * self.span, min((i + 1) * self.span, time_steps))


Drop = Kept | Tensor | None  # a selection; a mask [time, batch or 1, units]; nothing dropped


def keep_units(units: int, time_steps: int, p: float, span: int, device: torch.device | None = None) -> Kept:
    """Draw which units stay, a share 1 - p of them, once for every span of time steps.

    Their number is fixed, as products of one size are planned once; every unit is kept with the same probability.
    """
    kept = max(1, round((1.0 - p) * units))
    spans = -(-time_steps // span)
    columns = torch.rand(spans, units, device=device).argsort(dim=1)[:, :kept].sort(dim=1).values
    return Kept(columns=columns, span=span, scale=units / kept)


def keep_elements(shape: tuple[int, ...], p: float, like: Tensor) -> Tensor:
    """Return a mask of ordinary dropout: every element by itself is 0 with probability p, else 1 / (1 - p)."""
    mask = torch.rand(shape, dtype=like.dtype, device=like.device)  # three times as fast as bernoulli_ on a processor
    return mask.lt_(1.0 - p).mul_(1.0 / (1.0 - p))


class LSTMLayer(torch.autograd.Function):
    """One layer over a whole sequence, differentiated by hand: products over all time steps are one product each."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, h0: Tensor, c0: Tensor, w_ih: Tensor, w_hh: Tensor, bias: Tensor, of_x: Drop, of_h: Drop
    ) -> tuple[Tensor, Tensor]:
        """Return outputs h_t [time, batch, hidden] and the last cell state [batch, hidden].

        x is [time, batch, input], h0 and c0 [batch, hidden], w_ih [4 hidden, input], w_hh [4 hidden, hidden] and bias
        [4 hidden]; `of_x` and `of_h` say what is dropped of the inputs and of h_{t-1}.
        """
        time_steps, batch, hidden = x.shape[0], x.shape[1], h0.shape[1]
        fed, small_ih, gates = project(x, w_ih, bias, of_x)
        small_hh = smaller_weights(w_hh, of_h, time_steps)
        c = x.new_empty(time_steps + 1, batch, hidden)
        c[0] = c0
        tanh_c, out = x.new_empty(time_steps, batch, hidden), x.new_empty(time_steps, batch, hidden)
        width = small_hh[0].shape[1]
        fed_h = x.new_empty(time_steps, batch, width) if of_h is not None else None
        h, before = h0, c[0]
        columns = zip(
            gates.unbind(0),
            gates[..., : 2 * hidden].unbind(0),
            *(part.unbind(0) for part in gates.split(hidden, dim=-1)),
            c[1:].unbind(0),
            tanh_c.unbind(0),
            out.unbind(0),
            strict=True,
        )
        for t, (all_gates, both, i, f, g, o, after, squashed, result) in enumerate(columns):
            feed_back(all_gates, h, t, small_hh, of_h, fed_h)
            both.sigmoid_()
            g.tanh_()
            o.sigmoid_()
            torch.mul(f, before, out=after).addcmul_(i, g)
            torch.tanh(after, out=squashed)
            h, before = torch.mul(o, squashed, out=result), after
        masks = [each for each in (of_x, of_h) if isinstance(each, Tensor)]
        saved = [fed, h0, gates, c, tanh_c, out, *masks, *([fed_h] if fed_h is not None else [])]
        ctx.save_for_backward(*saved, *small_ih, *small_hh)
        ctx.counts = len(saved), len(small_ih)
        ctx.of_x, ctx.of_h = (each if isinstance(each, Kept) else isinstance(each, Tensor) for each in (of_x, of_h))
        ctx.sizes = w_ih.shape[1], w_hh.shape[1]
        return out, c[-1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_last: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients of everything that `forward` takes but the masks."""
        count, spans_ih = ctx.counts
        stored = list(ctx.saved_tensors[:count])
        small_ih, small_hh = ctx.saved_tensors[count : count + spans_ih], ctx.saved_tensors[count + spans_ih :]
        fed, h0, gates, c, tanh_c, out = stored[:6]
        rest = stored[6:]
        of_x: Drop = rest.pop(0) if ctx.of_x is True else ctx.of_x or None
        of_h: Drop = rest.pop(0) if ctx.of_h is True else ctx.of_h or None
        time_steps, batch, hidden = out.shape
        fed_h = rest.pop(0) if rest else torch.cat([h0.unsqueeze(0), out[:-1]])

        d_gates, through = _factors(gates, c, tanh_c, out)
        d_h, d_c = d_out.clone(), d_last.clone()  # d_out may be an expanded view
        d_h0 = torch.zeros_like(h0)
        per_step = zip(
            d_gates.unbind(0),
            d_gates[..., : 3 * hidden].view(time_steps, batch, 3, hidden).unbind(0),
            d_gates[..., 3 * hidden :].unbind(0),
            gates[..., hidden : 2 * hidden].unbind(0),
            through.unbind(0),
            d_h.unbind(0),
            (d_h0, *d_h.unbind(0)[:-1]),
            strict=True,
        )
        for t, (d_all, d_ifg, d_o, forget, factor, dh, earlier) in reversed(list(enumerate(per_step))):
            d_c.addcmul_(dh, factor)
            d_ifg.mul_(d_c.unsqueeze(1))
            d_o.mul_(dh)
            d_c.mul_(forget)
            pass_back(earlier, d_all, t, small_hh, of_h)
        inputs, units = ctx.sizes
        needs = ctx.needs_input_grad
        return (
            input_gradient(d_gates, small_ih, of_x, inputs) if needs[0] else None,
            d_h0 if needs[1] else None,
            d_c if needs[2] else None,
            weight_gradient(d_gates, fed, of_x, inputs) if needs[3] else None,
            weight_gradient(d_gates, fed_h, of_h, units) if needs[4] else None,
            d_gates.sum((0, 1)) if needs[5] else None,
            None,
            None,
        )


def smaller_weights(weight: Tensor, drop: Drop, time_steps: int) -> list[Tensor]:
    """Return the columns of `weight` [gates, units] that are needed, per span; gathered once per span."""
    if not isinstance(drop, Kept):
        return [weight]
    return [weight.index_select(1, columns) for columns, _ in drop.parts(time_steps)]


def feed_back(gates: Tensor, h: Tensor, t: int, smaller: Sequence[Tensor], drop: Drop, fed: Tensor | None) -> None:
    """Add what h [batch, units] contributes to the gates of time step t, and keep what was fed to the product."""
    if fed is None or drop is None:
        gates.addmm_(h, smaller[0].t())
    elif isinstance(drop, Kept):
        span = t // drop.span
        torch.index_select(h, 1, drop.columns[span], out=fed[t])
        gates.addmm_(fed[t], smaller[span].t(), alpha=drop.scale)
    else:
        gates.addmm_(torch.mul(h, drop[t], out=fed[t]), smaller[0].t())


def pass_back(d_h: Tensor, d_gates: Tensor, t: int, smaller: Sequence[Tensor], drop: Drop) -> None:
    """Add what the gates of time step t contribute to the gradient of the h that was fed to them."""
    if isinstance(drop, Kept):
        span = t // drop.span
        d_h.index_add_(1, drop.columns[span], d_gates.mm(smaller[span]), alpha=drop.scale)
    elif drop is not None:
        d_h.addcmul_(d_gates.mm(smaller[0]), drop[t])
    else:
        d_h.addmm_(d_gates, smaller[0])


def project(x: Tensor, weight: Tensor, bias: Tensor, drop: Drop) -> tuple[Tensor, list[Tensor], Tensor]:
    """Return what is fed to the product [time, batch, kept], the weights used per span, and x W' + b of all
    time steps.
    """
    time_steps, batch = x.shape[:2]
    smaller = smaller_weights(weight, drop, time_steps)
    if not isinstance(drop, Kept):
        fed = x if drop is None else x * drop
        return fed, smaller, torch.addmm(bias, fed.flatten(0, 1), weight.t()).view(time_steps, batch, -1)
    fed = x.new_empty(time_steps, batch, drop.columns.shape[1])
    gates = x.new_empty(time_steps, batch, weight.shape[0])
    for (columns, steps), part in zip(drop.parts(time_steps), smaller, strict=True):
        torch.index_select(x[steps], 2, columns, out=fed[steps])
        torch.addmm(bias, fed[steps].flatten(0, 1), part.t(), alpha=drop.scale, out=gates[steps].flatten(0, 1))
    return fed, smaller, gates


def _factors(gates: Tensor, c: Tensor, tanh_c: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Return what d_c (gates i, f, g) and d_h (gate o) are multiplied with, [time, batch, 4 hidden]; and d c_t
    / d h_t.
    """
    i, f, g, o = gates.chunk(4, dim=-1)
    factors = torch.empty_like(gates)
    of_i, of_f, of_g, of_o = factors.chunk(4, dim=-1)
    torch.addcmul(i, i, i, value=-1.0, out=of_i).mul_(g)
    torch.addcmul(f, f, f, value=-1.0, out=of_f).mul_(c[:-1])
    torch.addcmul(i, torch.mul(i, g, out=of_g), g, value=-1.0, out=of_g)
    torch.addcmul(o, o, o, value=-1.0, out=of_o).mul_(tanh_c)
    return factors, torch.addcmul(o, out, tanh_c, value=-1.0)


def input_gradient(d_gates: Tensor, smaller: Sequence[Tensor], drop: Drop, units: int) -> Tensor:
    """Return the gradient of the input, [time, batch, units]: zero where a unit was dropped."""
    time_steps, batch, _ = d_gates.shape
    if not isinstance(drop, Kept):
        d_x = d_gates.flatten(0, 1).mm(smaller[0]).view(time_steps, batch, units)
        return d_x if drop is None else d_x.mul_(drop)
    d_x = d_gates.new_zeros(time_steps, batch, units)
    for (columns, steps), part in zip(drop.parts(time_steps), smaller, strict=True):
        small = d_gates[steps].flatten(0, 1).mm(part)
        d_x[steps].flatten(0, 1).index_add_(1, columns, small, alpha=drop.scale)
    return d_x


def weight_gradient(d_gates: Tensor, fed: Tensor, drop: Drop, units: int) -> Tensor:
    """Return the gradient of a weight, [4 hidden, units]: zero in columns that were dropped throughout."""
    flat = d_gates.flatten(0, 1)
    if not isinstance(drop, Kept):
        return flat.t().mm(fed.flatten(0, 1))
    kept = drop.columns.shape[1]
    if len(drop.columns) == 1:
        # Reading along a row is faster than writing scattered: a column of zeros stands for all that were dropped.
        padded = fed.new_zeros(flat.shape[1], kept + 1)
        small = padded[:, :kept]
        torch.addmm(small, flat.t(), fed.flatten(0, 1), beta=0.0, alpha=drop.scale, out=small)
        place = torch.full((units,), kept, dtype=torch.int64, device=fed.device)
        place[drop.columns[0]] = torch.arange(kept, device=fed.device)
        return padded.index_select(1, place)
    turned = fed.new_zeros(units, flat.shape[1])  # whole rows are added up
    for columns, steps in drop.parts(fed.shape[0]):
        small = fed[steps].flatten(0, 1).t().mm(d_gates[steps].flatten(0, 1))
        turned.index_add_(0, columns, small, alpha=drop.scale)
    return turned.t().contiguous()


class DropoutLSTM(nn.LSTM):
    """An LSTM with ordinary dropout on the inputs of every layer and, with connections="both", on h_{t-1} too.

    Every element of every sample is dropped by itself, redrawn per time step. One direction, no projection, no packed
    sequences. `p` is the probability of dropping; `dropout` of `nn.LSTM` (between layers only) is not used.
    Raises NotApplicableError for a p outside [0, 1) or unknown connections.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        p: float = 0.5,
        connections: str = "both",
        bias: bool = True,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        if not 0.0 <= p < 1.0:
            raise NotApplicableError(f"dropout with p={p} keeps nothing; give a p of at least 0 and below 1.")
        if connections not in CONNECTIONS:
            raise NotApplicableError(f"there are no connections {connections!r}; choose input or both.")
        super().__init__(
            input_size, hidden_size, num_layers, bias=bias, batch_first=batch_first, device=device, dtype=dtype
        )
        self.p = p
        self.connections = connections

    def drop_inputs(self, x: Tensor) -> Drop:
        """Draw what to drop of a layer's inputs x [time, batch, input]."""
        return keep_elements(tuple(x.shape), self.p, x) if self.p else None

    def drop_recurrent(self, time_steps: int, h: Tensor) -> Drop:
        """Draw what to drop of h [batch, hidden] on its way into each of the time steps."""
        if not self.p or self.connections == "input":
            return None
        return keep_elements((time_steps, *h.shape), self.p, h)

    def forward(  # type: ignore[override]  # nn.LSTM declares packed sequences too
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run forward as `nn.LSTM` does: input [time, batch, input] (or batch first); hx a pair of [layers, batch,
        hidden].

        Raises NotApplicableError for packed or unbatched sequences in training.
        """
        if not self.training:
            return super().forward(input, hx)
        if not isinstance(input, Tensor) or input.ndim != 3:
            raise NotApplicableError(f"{type(self).__name__} trains on tensors [time, batch, input] only.")
        with torch.autocast(input.device.type, enabled=False):
            x = (input.transpose(0, 1) if self.batch_first else input).to(self.all_weights[0][0].dtype)
            if hx is None:
                zero = x.new_zeros(self.num_layers, x.shape[1], self.hidden_size)
                hx = zero, zero
            h_last, c_last = [], []
            for layer, (h0, c0) in enumerate(zip(*hx, strict=True)):
                w_ih, w_hh, *biases = (getattr(self, name) for name in self._all_weights[layer])
                bias = biases[0] + biases[1] if biases else w_ih.new_zeros(w_ih.shape[0])
                of_x, of_h = self.drop_inputs(x), self.drop_recurrent(len(x), h0)
                x, c = LSTMLayer.apply(x, h0.to(x.dtype), c0.to(x.dtype), w_ih, w_hh, bias, of_x, of_h)  # type: ignore[no-untyped-call]
                h_last.append(x[-1])
                c_last.append(c)
            out = x.transpose(0, 1) if self.batch_first else x
            return out, (torch.stack(h_last), torch.stack(c_last))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, p={self.p}, connections={self.connections}"


class StructuredDropoutLSTM(DropoutLSTM):
    """An LSTM that drops the same units for all samples of a batch, so that its products shrink to the kept units.

    Units are redrawn in every training step and, within one, every `span` time steps: 1 is the paper's proposal (its
    case III), 0 stands for the whole sequence (case IV), where weights are gathered only once. `structured` says which
    of the `connections` are dropped this way; the others keep ordinary dropout.
    """

    def __init__(self, *sizes: int, span: int = 0, structured: str = "both", **settings: Any) -> None:
        super().__init__(*sizes, **settings)
        if span < 0:
            raise NotApplicableError(f"span={span} is below 0; give a number of time steps, or 0 for all of them.")
        if structured not in CONNECTIONS:
            raise NotApplicableError(f"there are no connections {structured!r}; choose input or both.")
        self.span = span
        self.structured = structured

    @classmethod
    def taking_over(cls, module: nn.LSTM, *, p: float, connections: str, structured: str, span: int) -> Self:
        """Return an LSTM with the very parameters of another one, so that optimizers continue with them.

        Raises NotApplicableError where the other one has two directions or a projection.
        """
        if module.bidirectional or module.proj_size:
            raise NotApplicableError("an LSTM with two directions or a projection has no structured dropout here.")
        made = cls(
            module.input_size,
            module.hidden_size,
            module.num_layers,
            p=p,
            connections=connections,
            structured=structured,
            span=span,
            bias=module.bias,
            batch_first=module.batch_first,
            device="meta",
        )
        for name, parameter in module.named_parameters():
            setattr(made, name, parameter)
        return made.train(module.training)

    def drop_inputs(self, x: Tensor) -> Drop:
        if not self.p:
            return None
        return keep_units(x.shape[2], len(x), self.p, self.span or len(x), x.device)

    def drop_recurrent(self, time_steps: int, h: Tensor) -> Drop:
        if not self.p or self.connections == "input" or self.structured == "input":
            return super().drop_recurrent(time_steps, h)
        return keep_units(h.shape[1], time_steps, self.p, self.span or time_steps, h.device)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, structured={self.structured}, span={self.span}"
