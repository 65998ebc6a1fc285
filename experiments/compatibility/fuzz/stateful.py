"""Operations of random programs that draw numbers or update buffers, Fourier transforms, and biased attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from experiments.compatibility.fuzz.operations import OPERATIONS, Operation, Text
from experiments.compatibility.fuzz.scope import Pick, Unfit

_DRAWN = """
{x}+torch.randn_like({x}) {x}*torch.rand_like({x}) {x}+0.1*torch.randn({x}.shape,dtype={x}.dtype) F.dropout({x},0.3)
{x}.masked_fill(torch.rand_like({x})<0.3,0.0) torch.where(torch.rand({x}.shape)<0.5,{x},-{x})
{x}*torch.bernoulli(torch.full_like({x},0.7)) {x}*torch.empty_like({x}).bernoulli_(0.8)
{x}+torch.empty_like({x}).normal_(0.0,0.5)
{x}*{x}.new_empty(({x}.shape[0],)+(1,)*({x}.dim()-1)).bernoulli_(0.7).div_(0.7)
F.gumbel_softmax({x},tau=0.7) F.gumbel_softmax({x},hard=True) F.alpha_dropout({x},0.2,training=True)
F.dropout1d({x},0.2) F.feature_alpha_dropout({x},0.3,training=True) F.rrelu({x},training=True) torch.normal({x},0.3)
torch.normal({x},{x}.abs()) {x}+torch.normal(0.0,{x}.abs()+0.1) {x}+torch.randint(0,5,{x}.shape)
{x}*torch.randint_like({x},1,3) {x}*torch.bernoulli({x}.sigmoid()) {x}*torch.randn({n},dtype={x}.dtype)
{x}+torch.rand((),dtype={x}.dtype) {x}[...,torch.randperm({n})] {x}*torch.empty_like({x}).exponential_(2.0)
{x}+torch.empty_like({x}).uniform_(-1,1) {x}*torch.empty_like({x}).log_normal_(0.0,0.2)
{x}+torch.empty_like({x}).cauchy_().clamp(-3,3) {x}*torch.empty_like({x}).geometric_(0.5)
{x}.gather(1,torch.rand_like({x}).argsort(1)) {x}[:,torch.randperm({x}.shape[1])] {x}[torch.randperm({x}.shape[0])]
torch.multinomial({x}.flatten(0,-2).softmax(-1),1) torch.multinomial({x}.flatten(0,-2).softmax(-1),2)
F.one_hot(torch.multinomial({x}.flatten(0,-2).softmax(-1),1)[:,0],{n}).double()
{x}+torch.randn({x}.shape[0],*[1]*({x}.dim()-1),dtype={x}.dtype) {x}+torch.randn({x}.shape[1:],dtype={x}.dtype)
torch.distributions.Normal({x},0.5,validate_args=False).rsample()
torch.distributions.Bernoulli(logits={x},validate_args=False).sample()+{x}
torch.lerp({x},-{x},torch.rand({x}.shape[0],*[1]*({x}.dim()-1),dtype={x}.dtype)) F.dropout({x},0.3)+F.dropout({x},0.3)
F.dropout({x}.clone(),0.5,inplace=True) {x}*(torch.rand({x}.shape[0],{x}.shape[1],1)<0.5)
""".split()

_FOURIER = """
torch.fft.fft({x}).real torch.fft.fft({x},dim=1).imag torch.fft.fft2({x}).real torch.fft.fftn({x}).real
torch.fft.ifft({x}).real torch.fft.rfft({x}).abs() torch.fft.irfft(torch.fft.rfft({x}),n={n})
torch.fft.irfft(torch.fft.rfft({x},dim=1),n={x}.shape[1],dim=1) torch.fft.fftshift({x},dim=-1)
torch.fft.ifft(torch.fft.fft({x})*torch.fft.fft({x}.flip(-1))).real torch.fft.fft(torch.fft.fft({x},dim=-1),dim=-2).real
torch.fft.ifft2(torch.fft.fft2({x},norm="ortho")*torch.fft.fft2({x},norm="ortho").conj()).real
torch.fft.hfft({x}).tanh() torch.fft.ihfft({x}).real torch.fft.rfft({x},n=6).imag torch.fft.rfft2({x}).abs()
torch.fft.rfftn({x},dim=(1,2)).real torch.fft.irfft2(torch.fft.rfft2({x}),s={x}.shape[-2:])
torch.fft.fft({x},n=5).abs()
torch.fft.ifftshift({x},dim=(-1,)) torch.polar({x}.abs()+0.1,{x}).real torch.complex({x},{x}.cos()).abs()
torch.view_as_real(torch.fft.fft({x})).flatten(-2)
torch.view_as_real(torch.complex({x},-{x}).conj().resolve_conj()).sum(-1)
(torch.complex({x},{x}.sin())*torch.complex({x}.cos(),{x})).imag torch.complex({x},{x}*2).angle()
(torch.fft.rfft({x})*torch.complex({w},{w}.cos())).real torch.fft.rfft({x}*{w2},norm="forward").abs()
torch.fft.irfft(torch.fft.rfft({x},dim=-1)*torch.view_as_complex({c}),n={n},dim=-1)
""".split()


def _filled(templates: list[str]) -> Operation:
    """Return the operation that fills in one of the templates: a value, the size of its last dim, parameters of it."""

    def text(p: Pick) -> Text:
        x, _ = p.with_fixed()
        n, template = p.fixed(x, -1), p.one(templates)
        makers: Mapping[str, Callable[[], str]] = {
            "{n}": lambda: str(n),
            "{w}": lambda: p.param(n // 2 + 1),
            "{w2}": lambda: p.param(n),
            "{c}": lambda: p.param(n // 2 + 1, 2),
        }
        for name, make in makers.items():
            if name in template:
                template = template.replace(name, make())
        return template.replace("{x}", x)

    return text


def _modules(p: Pick) -> Text:
    """Modules of torch.nn that draw."""
    x = p.f(3, 3)
    n = p.fixed(x, -1)
    form = p.one(("dropout", "encoder", "attention", "alpha", "features", "decoder"))
    if form == "encoder":
        more = ", norm_first=True" if p.flag() else ""
        return f"{p.module(f'nn.TransformerEncoderLayer({n}, 2, 16, 0.2, batch_first=True{more})')}({x})"
    if form == "decoder":
        return f"{p.module(f'nn.TransformerDecoderLayer({n}, 2, 16, 0.2, batch_first=True)')}({x}, {x})"
    if form == "attention":
        made = p.module(f"nn.MultiheadAttention({n}, 2, dropout=0.3, batch_first=True)")
        return f"{made}({x}, {x}, {x}, need_weights={p.one((False, True))})[0]"
    text = {"dropout": "nn.Dropout(0.3)", "alpha": "nn.AlphaDropout(0.2)", "features": "nn.Dropout1d(0.2)"}[form]
    return f"{p.module(text)}({x})"


def _biased(p: Pick) -> Text:
    """Attention whose probabilities are dropped, or whose scores have sinks, a cap, slopes or a bias by key."""
    x = p.f(3, 3)
    n, heads, size = p.fixed(x, -1), p.one((2, 4)), 4
    q, k, v = (p.module(f"nn.Linear({n}, {heads * size})") for _ in range(3))
    o = p.module(f"nn.Linear({heads * size}, {n})")
    length = f"{x}.shape[1]"
    lines = [
        f"q, k, v = ({', '.join(f'{m}({x}).unflatten(-1, (-1, {size})).transpose(1, 2)' for m in (q, k, v))})",
        f"places = torch.arange({length}, dtype={x}.dtype)",
    ]
    dropped = p.one((0.0, 0.3))
    form = p.one(("kernel", "causal kernel", "slopes", "causal slopes", "by key", "sinks", "cap", "eager"))
    slopes = p.buffer(f"(2.0 ** -torch.arange(1, {heads + 1}))").removesuffix(".double()")
    ahead = f"torch.ones({length}, {length}, dtype=torch.bool).triu(1)"
    if form in ("kernel", "causal kernel"):
        causal = ", is_causal=True" if form == "causal kernel" else ""
        lines += [f"out = F.scaled_dot_product_attention(q, k, v, dropout_p={dropped}{causal})"]
    elif form == "by key":
        lines += [
            f"bias = {slopes}.view(-1, 1, 1) * places",
            f"out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p={dropped})",
        ]
    elif form in ("slopes", "causal slopes"):
        lines += [f"bias = {slopes}.view(-1, 1, 1) * (places - places[:, None])"]
        if form == "causal slopes":
            lines += [f'bias = bias.masked_fill({ahead}, float("-inf"))']
        lines += [f"out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p={dropped})"]
    else:
        lines += [f"scores = q @ k.transpose(-1, -2) * {size**-0.5}"]
        if form == "cap":
            lines += ["scores = 2.0 * torch.tanh(scores / 2.0)"]
        lines += [f'scores = scores.masked_fill({ahead}, float("-inf"))'] if p.flag() else []
        if form == "sinks":
            sinks = p.param(heads)
            lines += [
                f"sinks = {sinks}.view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)",
                "shares = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]",
            ]
        else:
            lines += ["shares = scores.softmax(-1)"]
        lines += [f"out = F.dropout(shares, {dropped}, self.training) @ v"]
    return [*lines, f"{{out}} = {x} + {o}(out.transpose(1, 2).flatten(2))"]


def _updated(p: Pick) -> Text:
    """A buffer of one number for each place of the last dim that a forward changes, and what is read of it."""
    x, _ = p.with_fixed()
    n = p.fixed(x, -1)
    b = p.registered(p.one((f"torch.zeros({n})", f"torch.full(({n},), 0.5)")))
    flat = p.one((f"{x}.detach().reshape(-1, {n})", f"{x}.detach().flatten(0, -2)"))
    found = p.one(
        (
            "flat.mean(0)", "flat.amax(0)", "flat.amin(0)", "flat.var(0, unbiased=False)", "flat.sum(0) * 0.1",
            "flat.square().mean(0).sqrt()", "flat.abs().max()", "flat.abs().mean()", "(flat > 0).double().mean(0)",
            "flat[0]", "flat.median(0)[0]", "flat.std(0)", "flat.norm(dim=0)", "torch.ones(())", "flat.shape[0] * 0.1",
            "F.one_hot(flat.argmax(-1), flat.shape[-1]).double().mean(0)",
        )
    )  # fmt: skip
    change = p.one(
        (
            f"{b}.mul_(0.9).add_({found}, alpha=0.1)" if "shape" not in found else f"{b}.mul_(0.9).add_({found})",
            f"{b} = 0.8 * {b} + 0.2 * {found}",
            f"{b}.copy_(torch.maximum({b}, {found} + torch.zeros_like({b})))",
            f"{b}.lerp_({found} + torch.zeros_like({b}), 0.2)",
            f"{b} += {found}",
            f"{b}.add_({found} - {b}, alpha=0.5)",
            f"{b}[:1] = {found} if {b}.dim() == 0 else ({found} + torch.zeros_like({b}))[:1]",
            f"{b}.data.mul_(0.9).add_(0.1 * {found})",
            f"{b} = torch.where({b} > 0.3, {b} * 0.9, {found} + torch.zeros_like({b}))",
            f"{b}.copy_({found})" if "shape" not in found else f"{b}.fill_({found})",
        )
    )
    reads = (f"{{out}} = {x} - {b}", f"{{out}} = {x} * (1 + {b}.tanh())", f"{{out}} = {x} / (1 + {b}.abs())")
    lines = [f"flat = {flat}", change]
    guard = p.one(("", "if self.training:", "with torch.no_grad():"))
    if guard:
        lines = [guard, *(f"    {line}" for line in lines)]
    order = p.one(("before", "after", "both", "unread"))
    if order == "unread":
        return [*lines, f"{{out}} = {x} * 1"]
    if order == "both":
        return [f"old = {x} - {b}", *lines, f"{{out}} = old * (1 + {b}.abs())"]
    read = p.one(reads)
    return [read, *lines] if order == "before" else [*lines, read]


def _counted(p: Pick) -> Text:
    """A counter of forwards, or of samples, that scales a value."""
    x = p.f()
    kind = p.one(("torch.zeros((), dtype=torch.long)", "torch.zeros(())", "torch.ones(1)"))
    b = p.registered(kind)
    change = p.one((f"{b} += 1", f"{b}.add_({x}.shape[0])", f"{b} = {b} + 1", f"{b}.add_(1)", f"{b}.mul_(2).add_(1)"))
    read = p.one((f"{x} * torch.clamp({b} / 10, max=1.0)", f"{x} + {b}", f"torch.where({b} < 2, {x}, -{x})"))
    return [change, f"{{out}} = {read}"] if p.flag() else [f"{{out}} = {read}", change]


def _norms(p: Pick) -> Text:
    """Batch norm that trains, and spectral norm of a weight."""
    x = p.f(2)
    n = p.fixed(x, -1)
    form = p.one(("batch", "batch of rows", "spectral", "spectral hook", "weight", "instance"))
    if form == "batch" and p.rank(x) == 3:
        more = p.one(("", ", momentum=0.3", ", momentum=None", ", affine=False", ", track_running_stats=False"))
        return f"{p.module(f'nn.BatchNorm1d({n}{more})')}({x}.transpose(1, 2)).transpose(1, 2)"
    if form in ("batch", "batch of rows"):
        return f"{p.module(f'nn.BatchNorm1d({n})')}({x}.reshape(-1, {n})).view({x}.shape)"
    if form == "instance":
        if p.rank(x) != 3:
            raise Unfit
        return f"{p.module(f'nn.InstanceNorm1d({n}, affine=True)')}({x}.transpose(1, 2)).transpose(1, 2)"
    wrap = {
        "spectral": "nn.utils.parametrizations.spectral_norm",
        "spectral hook": "nn.utils.spectral_norm",
        "weight": "nn.utils.parametrizations.weight_norm",
    }[form]
    return f"{p.module(f'{wrap}(nn.Linear({n}, {n}))')}({x})"


def _codebook(p: Pick) -> Text:
    """A codebook as moving averages, a router that follows the load, or a slow copy of a parameter."""
    x, _ = p.with_fixed()
    n = p.fixed(x, -1)
    form = p.one(("codebook", "router", "teacher", "queue"))
    if form == "teacher":
        w, b = p.param(n, n), p.registered(f"torch.randn({n}, {n}) * 0.1")
        lines = ["with torch.no_grad():", f"    {b}.mul_(0.9).add_({w}, alpha=0.1)"]
        return [*lines, f"{{out}} = {x} @ {w} - 0.5 * ({x} @ {b})"]
    if form == "router":
        w, b = p.param(4, n), p.registered("torch.zeros(4)")
        return [
            f"scores = F.linear({x}, {w}).sigmoid()",
            f"chosen = F.one_hot((scores + {b}).topk(2, -1)[1], 4).double().sum(-2)",
            "with torch.no_grad():",
            "    load = chosen.flatten(0, -2).sum(0)",
            f"    {b}.add_(torch.sign(load.mean() - load), alpha=0.05)",
            f"{{out}} = (scores * chosen) @ {w}",
        ]
    if form == "queue":
        b = p.registered(f"torch.zeros(3, {n})")
        return [
            f"{b} = torch.cat([{b}[1:], {x}.detach().reshape(-1, {n}).mean(0, keepdim=True)])",
            f"{{out}} = {x} - {b}.mean(0)",
        ]
    codes, sizes = p.registered(f"torch.randn(6, {n})"), p.registered("torch.ones(6)")
    return [
        f"flat = {x}.reshape(-1, {n})",
        f"index = torch.cdist(flat.detach(), {codes}).argmin(1)",
        f"found = F.embedding(index, {codes}).view_as({x})",
        "chosen = F.one_hot(index, 6).to(flat.dtype)",
        f"{sizes}.data.mul_(0.9).add_(chosen.sum(0), alpha=0.1)",
        f"{codes}.data.mul_(0.9).add_((chosen.t() @ flat.detach()) / {sizes}.unsqueeze(1), alpha=0.1)",
        f"{{out}} = {x} + (found - {x}).detach() + 0.25 * ({x} - found.detach())",
    ]


STATEFUL: Mapping[str, Operation] = {
    "drawn": _filled(_DRAWN),
    "drawing modules": _modules,
    "biased attention": _biased,
    "updated": _updated,
    "counted": _counted,
    "norms in training": _norms,
    "codebook": _codebook,
    "fourier": _filled(_FOURIER),
}
ALL_OPERATIONS: Mapping[str, Operation] = {**OPERATIONS, **STATEFUL}
