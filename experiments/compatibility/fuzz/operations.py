"""The operations of random programs: for each family, how the text of one statement is drawn.

Every function takes a `Pick` and returns an expression, or the lines of a statement that is more than one expression
(the last one assigns to `{out}`). It raises Unfit where no value fits; what PyTorch refuses is left out by the scope.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from experiments.compatibility.fuzz.scope import WIDTH, Pick, Unfit

Text = str | list[str]
Operation = Callable[[Pick], Text]

_UNARY = """
torch.relu({x}) F.silu({x}) F.gelu({x}) torch.tanh({x}) torch.sigmoid({x}) torch.exp({x}) torch.cos({x})
torch.sin({x}) torch.erf({x}) torch.abs({x}) torch.square({x}) -{x} F.softplus({x}) F.mish({x}) F.elu({x})
F.celu({x}) F.leaky_relu({x},0.1) F.hardtanh({x}) F.hardswish({x}) F.selu({x}) F.logsigmoid({x}) F.softsign({x})
F.relu6({x}) F.hardsigmoid({x}) F.tanhshrink({x}) F.softshrink({x},0.2) {x}.floor() {x}.ceil() {x}.round()
{x}.trunc() {x}.sign() torch.expm1({x}) torch.log1p({x}.abs()) torch.atan({x}) torch.asinh({x}) torch.sinh({x})
torch.erfc({x}) {x}.frac() torch.log({x}.abs()+1) torch.rsqrt({x}.square()+1) torch.sqrt({x}.square()+0.5)
torch.reciprocal({x}.abs()+1) torch.nan_to_num({x}) F.gelu({x},approximate="tanh") F.softplus({x},2.0,0.5)
torch.clamp({x},-1.0,1.0) {x}.clamp(min=0.1) {x}.clamp(max=0.5) {x}.clamp_min(0.0) {x}.clone() {x}.contiguous()
{x}.detach() {x}.double() {x}.to(torch.float64) {x}.requires_grad_().square() torch.zeros_like({x})+{x}
torch.ones_like({x})*{x} torch.full_like({x},0.5)*{x} F.dropout({x},0.0) F.dropout({x},0.5,training=False)
torch.logit(torch.sigmoid({x})) F.threshold({x},0.1,-0.5) F.prelu({x},{x}.new_full((1,),0.2)) {x}.positive()
torch.deg2rad({x}) torch.sinc({x}) torch.logaddexp({x},-{x}) {x}.view_as({x}) {x}.type_as({x})
torch.heaviside({x},{x}.new_ones(())) {x}.alias() {x}.fill_diagonal(0.0)
""".split()

_SCALAR = """
{x}+{c} {x}-{c} {x}*{c} {x}/{c} {c}-{x} {c}+{x} {c}*{x} {c}/({x}.abs()+1) {x}**2 {x}**3 {x}.abs()**0.5 2.0**{x}
{x}.square().add(1)**-0.5 torch.add({x},{c},alpha=3) torch.sub({x},{c},alpha=0.5) torch.rsub({x},{c}) {x}//{c}
{x}%{c} torch.rsub({x},{c},alpha=2) torch.fmod({x},{c}) torch.div({x},{c},rounding_mode="trunc")
torch.pow({x},{c}) torch.pow(1.5,{x}) torch.maximum({x},{x}.new_tensor({c})) torch.true_divide({x},{c})
{x}.remainder({c}) torch.float_power({x}.abs()+0.5,{c}) {x}.mul({c}).add({c}) torch.xlogy({x},2.0)
torch.add({x},0) {x}*1 {x}/1
""".split()

_BINARY = """
{x}+{y} {x}-{y} {x}*{y} {x}/({y}.abs()+1) torch.maximum({x},{y}) torch.minimum({x},{y}) torch.max({x},{y})
torch.min({x},{y}) torch.pow({x}.abs()+0.5,{y}) torch.atan2({x},{y}) torch.hypot({x},{y}.abs()+1)
torch.fmax({x},{y}) torch.add({x},{y},alpha=2) torch.sub({x},{y},alpha=0.5) torch.rsub({x},{y})
torch.rsub({x},{y},alpha=0.5) torch.lerp({x},{y},0.3) torch.lerp({x},{y},{x}.sigmoid())
torch.addcmul({x},{y},{x},value=0.5) torch.addcdiv({x},{y},{x}.abs()+1) torch.where({x}>{y},{x},{y})
torch.dist({x},{y}) {x}.fmod({y}.abs()+1) torch.floor_divide({x},{y}.abs()+1) torch.remainder({x},{y}.abs()+1)
torch.copysign({x},{y}) F.mse_loss({x},{y}) F.mse_loss({x},{y},reduction="sum")
F.mse_loss({x},{y},reduction="none") F.l1_loss({x},{y}) F.smooth_l1_loss({x},{y})
F.huber_loss({x},{y},delta=0.7) torch.clamp({x},max={y}) torch.clamp({x},{y}-1,{y}+1) torch.logaddexp({x},{y})
F.binary_cross_entropy_with_logits({x},{y}.sigmoid(),reduction="none") F.kl_div({x},{y},reduction="none")
F.cosine_similarity({x},{y},dim=-1) F.pairwise_distance({x},{y}) {x}.expand_as({y})
torch.broadcast_tensors({x},{y})[0] torch.heaviside({x},{y}) {x}.where({x}>0,{y}) torch.nextafter({x},{y})
""".split()

_COMPARED = "> < >= <= == !=".split()
_LOGICAL = """
{m}&{n} {m}|{n} {m}^{n} torch.logical_and({m},{n}) torch.logical_or({m},{n}) torch.logical_xor({m},{n}) ~{m}
torch.logical_not({m}) {m}=={n} {m}.bitwise_and({n}) {m}.logical_not() {m}!={n} {m}.bool() {m}.clone()
""".split()
_OF_MASKS = """
{m}.double() {m}.float() {m}.long() {m}.to(torch.int32) {m}.sum(-1) {m}.any(-1) {m}.all(-1) {m}.int()
{m}.cumsum(-1) {m}.float().sum() {m}.double().mean(-1,keepdim=True) 1-{m}.double() {m}*2.5 {m}.sum()
{m}.to(torch.float64) {m}.any() {m}.type(torch.float64) {m}.count_nonzero(-1) {m}.logical_not().double()
{m}.long().argmax(-1) {m}+1
""".split()
_OF_NUMBERS = """
{i}.double() {i}+1 {i}*2 {i}%3 {i}//2 {i}>3 {i}==2 {i}!=0 {i}.float() {i}.clamp(0,3) -{i} {i}.abs()
{i}.cumsum(-1) {i}.sum(-1) {i}/2 {i}.double().sin() {i}&3 {i}|1 {i}.int() 2-{i} torch.where({i}>2,{i},0) {i}<<1
{i}.max() {i}.max(-1)[0] {i}.argmax(-1) {i}.sort(-1)[0] {i}*0.5 {i}.square() torch.bitwise_xor({i},1)
{i}.to(torch.float64)**2 {i}.masked_fill({i}>3,-100) {i}.clone() {i}.flip(-1) {i}.pow(2)
torch.div({i},2,rounding_mode="floor") ~{i} {i}.bool() {i}.roll(1,-1) F.pad({i},(1,0),value=3) {i}[...,1:]
{i}.unsqueeze(-1) {i}.sum() {i}.double().mean() {i}>{i}.min()
""".split()

_REDUCED = """
{x}.sum({d}) {x}.mean({d}) {x}.sum({d},keepdim=True) {x}.mean({d},keepdim=True) {x}.amax({d}) {x}.amin({d})
{x}.amax({d},keepdim=True) {x}.var({d}) {x}.std({d}) {x}.var({d},unbiased=False) {x}.logsumexp({d})
{x}.norm(dim={d}) torch.linalg.vector_norm({x},dim={d},keepdim=True) torch.var_mean({x},dim={d})[0]
{x}.nansum({d}) {x}.norm(p=1,dim={d}) torch.std_mean({x},dim={d},keepdim=True)[1]
{x}.sum({d},dtype=torch.float64) torch.sum({x},dim={d}) torch.mean({x},{d},True)
torch.logsumexp({x},{d},keepdim=True) {x}.var({d},correction=0,keepdim=True)
""".split()
_ALONG = """
{x}.softmax({d}) F.log_softmax({x},dim={d}) {x}.max({d})[0] {x}.min({d})[0] {x}.max({d},keepdim=True)[0]
{x}.argmax({d}) {x}.argmin({d}) {x}.prod({d}) {x}.cumsum({d}) {x}.cumprod({d}) {x}.cummax({d})[0]
{x}.median({d})[0] {x}.sort({d})[0] {x}.sort({d},descending=True)[0] {x}.argsort({d}) {x}.flip({d})
{x}.roll(1,{d}) {x}.roll(-2,{d}) F.normalize({x},dim={d}) {x}.unbind({d})[0] {x}.unbind({d})[-1]
{x}.select({d},0) {x}.select({d},-1) {x}.diff(dim={d}) F.softmin({x},dim={d})
F.softmax({x},{d},dtype=torch.float64) {x}.logcumsumexp({d}) {x}.kthvalue(2,{d})[0] {x}.topk(2,{d})[0]
{x}.topk(1,{d})[1] {x}.topk(2,{d},sorted=True)[0] {x}.unsqueeze({d}) {x}.squeeze({d}) {x}.chunk(2,{d})[1]
{x}.split(2,{d})[0] {x}.split(2,{d})[-1] {x}.tensor_split(2,{d})[0] {x}.narrow({d},1,2)
{x}.repeat_interleave(2,{d}) {x}.repeat_interleave(2,dim={d}) torch.cat([{x},{x}],{d})
torch.stack([{x},-{x}],{d}) {x}.unfold({d},2,1) F.glu({x},{d}) {x}.any({d}) {x}.count_nonzero({d})
{x}.gt(0).all({d}) torch.cat([{x},{x}*2,{x}],{d}) {x}.sum({d}).unsqueeze({d}) {x}.max({d})[1]
{x}.min({d},keepdim=True)[1] {x}.argmax({d},keepdim=True) {x}.mode({d})[0] {x}.gather({d},{x}.argsort({d}))
{x}.take_along_dim({x}.argmax({d},keepdim=True),{d}) torch.trapezoid({x},dim={d})
{x}.index_select({d},torch.tensor([1,0])) {x}.index_select({d},torch.arange(2)) {x}.renorm(2,{d},1.0)
""".split()
_WHOLE = """
{x}.sum() {x}.mean() {x}.max() {x}.min() {x}.norm() {x}.std() {x}.flatten() {x}.reshape(-1) {x}.amax()
{x}.flatten(1) {x}.flatten(0,1) {x}.flatten(-2) {x}.T {x}.mT {x}.squeeze() {x}.unsqueeze(0) {x}[None]
{x}[...,None] {x}.square().sum().sqrt() {x}.tril() {x}.triu(1) {x}.tril(-1) {x}.ravel() torch.atleast_3d({x})
{x}.logsumexp((0,)) {x}.diagonal(dim1=-2,dim2=-1) torch.diag_embed({x}) {x}.repeat(1,1,2) {x}.tile(2)
{x}.expand(2,*{x}.shape) {x}.rot90() {x}[...,0] {x}[...,-1:] {x}[:,1:] {x}[:,:-1] {x}[:,-1] {x}[:,0]
{x}[...,::2] {x}[...,1::2] {x}[...,:3] {x}[...,-3:] {x}[:,::2] {x}[:,None] {x}[0] {x}[:1] {x}[:,[0,2]]
{x}[...,[1,0,3]] {x}[:,torch.arange({x}.shape[1])] {x}[:,:,1:3] {x}[:,{x}.shape[1]//2:] {x}[:,:{x}.shape[1]-2]
{x}[:,-3:] {x}.transpose(0,1) {x}.transpose(1,2) {x}.movedim(0,-1) {x}.swapaxes(-1,-2) {x}.adjoint()
{x}.unflatten(-1,(2,-1)) {x}.unflatten(-1,(-1,4)) {x}.reshape(*{x}.shape[:-1],2,-1)
{x}.view(*{x}.shape[:-1],-1,2) {x}.view({x}.size(0),-1) {x}.reshape({x}.size(0)*{x}.size(1),-1)
{x}.view(-1,{x}.size(-1))
torch.view_as_real(torch.view_as_complex({x}.reshape(*{x}.shape[:-1],-1,2)).square()).flatten(-2)
torch.fft.fft({x}).real torch.fft.rfft({x},norm="ortho").abs()
torch.cat([-{x}[...,{x}.shape[-1]//2:],{x}[...,:2]],-1) F.pad({x},(1,0)) F.pad({x},(0,2),value=0.5)
F.pad({x},(0,0,1,0)) F.pad({x},(-1,1)) F.pad({x},(1,1),mode="reflect") F.pad({x},(1,2),mode="circular")
F.max_pool1d({x},2) F.avg_pool1d({x},2,1) F.adaptive_avg_pool1d({x},2) F.interpolate({x},scale_factor=2)
F.layer_norm({x},{x}.shape[-1:]) F.rms_norm({x},{x}.shape[-1:]) F.local_response_norm({x},2) F.group_norm({x},2)
F.instance_norm({x}) {x}@{x}.mT torch.cdist({x},{x}) torch.einsum("...i,...j->...ij",{x},{x})
torch.einsum("bsd,btd->bst",{x},{x}) {x}.cov() torch.meshgrid({x}[0],{x}[0],indexing="ij")[0]
{x}.view({x}.shape) F.layer_norm({x},{x}.shape[-2:]) F.unfold({x}.unsqueeze(1),2)
F.scaled_dot_product_attention({x},{x},{x})
F.scaled_dot_product_attention({x}[:,None],{x}[:,None],{x}[:,None],is_causal=True)
torch.baddbmm({x},{x}@{x}.mT,{x}) F.one_hot({x}.argmax(-1),{x}.shape[-1]).double()*{x}
{x}.permute(*range({x}.dim()-1,-1,-1)) {x}.new_zeros(3)+1 {x}.scatter(-1,{x}.argmax(-1,keepdim=True),0.0)
{x}.masked_fill({x}>0.3,0.0) torch.where({x}>0,{x},0.0) {x}.triu() torch.where({x}>0,{x},-{x})
{x}.index_fill(-1,torch.tensor([1]),2.0) {x}.matrix_exp() torch.outer({x}.flatten()[:4],{x}.flatten()[:3])
{x}.index_add(-1,torch.tensor([0,0]),{x}[...,:2]) {x}.scatter_add(-1,{x}.argsort(-1),{x})
torch.cumulative_trapezoid({x}) torch.linalg.norm({x},dim=-1) {x}.repeat(2,*[1]*({x}.dim()-1))
{x}.masked_fill(torch.ones_like({x}).tril()==0,0.5) torch.special.entr({x}.sigmoid())
{x}.new_full({x}.shape,2.0)*{x} torch.vander({x}[0,0],3) {x}.logsumexp(-1,keepdim=True)-{x}
torch.empty_like({x}).copy_({x}) {x}.stride(0)*{x} {x}.numel()*{x} {x}.size(1)*{x} {x}/{x}.shape[1]
{x}*len({x}[0])
""".split()


def _filled(templates: list[str], **given: Callable[[Pick], str]) -> Operation:
    """Return the operation that fills in one of the templates."""

    def text(p: Pick) -> Text:
        template = p.one(templates)
        values: dict[str, str] = {}
        for name, pick in given.items():
            if f"{{{name}}}" in template:
                values[name] = pick(p)
        for name, value in values.items():
            template = template.replace(f"{{{name}}}", value)
        return template

    return text


def _both(templates: list[str]) -> Operation:
    def text(p: Pick) -> Text:
        x = p.f()
        y = p.partner(x)
        x, y = (y, x) if p.flag() else (x, y)
        return p.one(templates).replace("{x}", x).replace("{y}", y)

    return text


def _along(templates: list[str], several: bool) -> Operation:
    def text(p: Pick) -> Text:
        x = p.f()
        dims = str(p.dims(x)) if several and p.flag() else str(p.dim(x))
        return p.one(templates).replace("{x}", x).replace("{d}", dims)

    return text


def _masks(p: Pick) -> Text:
    m = p.m()
    return p.one(_LOGICAL).replace("{m}", m).replace("{n}", p.condition(m) if p.flag() else m)


def _compared(p: Pick) -> Text:
    x = p.f()
    other = p.partner(x) if p.flag() else str(p.number())
    return f"{x} {p.one(_COMPARED)} {other}"


def _chosen(p: Pick) -> Text:
    x = p.f()
    mask = p.condition(x)
    y = p.one([str(p.number()), p.partner(x)])
    forms = (
        f"torch.where({mask}, {x}, {y})",
        f"torch.where({mask}, {y}, {x})",
        f"{x}.masked_fill({mask}, {p.number()})",
        f"{x} * {mask}",
        f"{x}.where({mask}, {y})",
        f"{x}.masked_fill(~{mask}, {p.number()})",
        f"{x} + {mask}.double()",
        f"torch.where({mask}, {x}, torch.zeros_like({x}))",
        f"{x}.masked_fill({mask}, torch.tensor({p.number()}, dtype={x}.dtype))",
    )
    return p.one(forms)


def _linear(p: Pick) -> Text:
    x, dim = p.with_fixed()
    if dim != p.rank(x) - 1:
        raise Unfit
    n, out = p.fixed(x, -1), p.one((WIDTH, 12, 4, 16, 1))
    form = p.one(("linear", "module", "no bias", "matmul", "functional", "einsum", "mT", "addmm", "inner", "tensordot"))
    if form in ("module", "no bias"):
        return f"{p.module(f'nn.Linear({n}, {out}' + (', bias=False)' if form == 'no bias' else ')'))}({x})"
    w = p.param(out, n)
    texts = {
        "linear": f"F.linear({x}, {w})",
        "matmul": f"{x} @ {w}.t()",
        "einsum": f'torch.einsum("...i,oi->...o", {x}, {w})',
        "mT": f"torch.matmul({x}, {w}.mT)",
        "inner": f"torch.inner({x}, {w})",
        "tensordot": f"torch.tensordot({x}, {w}, dims=([-1], [1]))",
    }
    if form == "functional":
        return f"F.linear({x}, {w}, {p.param(out)})"
    if form == "addmm":
        more = p.one(("", ", beta=0.5", ", alpha=2.0", ", beta=0, alpha=0.5"))
        return f"torch.addmm({p.param(out)}, {x}.flatten(0, -2), {w}.t(){more}).unflatten(0, {x}.shape[:-1])"
    return texts[form]


def _product(p: Pick) -> Text:
    x = p.f(2)
    y = p.f(2)
    forms = (
        f"{x} @ {y}",
        f"{x} @ {y}.mT",
        f"{x}.mT @ {y}",
        f"torch.bmm({x}, {y})",
        f"torch.bmm({x}, {y}.transpose(1, 2))",
        f'torch.einsum("bsd,btd->bst", {x}, {y})',
        f'torch.einsum("bsd,bsd->bs", {x}, {y})',
        f'torch.einsum("bsd,bse->bde", {x}, {y})',
        f"torch.baddbmm({x}.new_zeros(1, 1, 1), {x}, {y}.mT, alpha=0.5)",
        f"torch.cat([{x}, {y}], -1)",
        f"torch.cat([{x}, {y}], 1)",
        f"torch.stack([{x}, {y}], 2)",
        f"torch.hstack([{x}, {y}])",
        f"torch.stack([{x}, {y}]).sum(0)",
        f"torch.cat([{x}[..., :3], {y}[..., 1:]], -1)",
        f"torch.outer({x}[0, 0], {y}[0, 0])",
        f"torch.cdist({x}, {y})",
        f"torch.vstack([{x}, {y}])",
        f"torch.cat([{x}[:, :1], {y}[:, 1:]], 1)",
        f"torch.stack([{x}, {y}], -1).flatten(-2)",
        f"torch.cat((torch.zeros_like({x}[:, :1]), {y}[:, :-1]), dim=1)",
        f"torch.kron({x}[0, :2, :2], {y}[0, :2, :2])",
        f"torch.linalg.multi_dot([{x}[0], {x}[0].T, {y}[0]])",
    )
    return p.one(forms)


def _norm(p: Pick) -> Text:
    x, _ = p.with_fixed()
    n = p.fixed(x, -1)
    forms = ("layer_norm", "module", "rms_norm", "rms module", "plain rms", "no bias", "group", "batch", "two dims")
    form = p.one(forms)
    if form == "layer_norm":
        return f"F.layer_norm({x}, ({n},), {p.param(n)}, {p.param(n)}, {p.one((1e-5, 1e-3))})"
    if form == "no bias":
        return f"F.layer_norm({x}, ({n},), {p.param(n)})"
    if form == "module":
        more = p.one(("", ", eps=1e-3", ", elementwise_affine=False", ", bias=False"))
        return f"{p.module(f'nn.LayerNorm({n}{more})')}({x})"
    if form == "rms_norm":
        return f"F.rms_norm({x}, ({n},), {p.param(n)}, {p.one((None, 1e-3))})"
    if form == "rms module":
        return f"{p.module(f'nn.RMSNorm({n})')}({x})"
    if form == "group":
        return f"{p.module(f'nn.GroupNorm(2, {n})')}({x}.transpose(1, -1)).transpose(1, -1)"
    if form == "batch":
        return f"{p.module(f'nn.BatchNorm1d({n}).eval()')}({x}.transpose(1, 2)).transpose(1, 2)"
    if form == "two dims":
        m = p.fixed(x, -2)
        return f"F.layer_norm({x}, ({m}, {n}), {p.param(m, n)})"
    return f"{p.param(n)} * {x} * torch.rsqrt({x}.pow(2).mean(-1, keepdim=True) + 1e-3)"


def _parameter(p: Pick) -> Text:
    x, _ = p.with_fixed()
    shape = [p.fixed(x, -1)]
    w = p.param(*shape)
    return p.one(
        (
            f"{x} * {w}",
            f"{x} + {w}",
            f"{w}",
            f"{w}.expand_as({x})",
            f"{x} * (1 + {w})",
            f"{x} * {w}.softmax(-1)",
            f"torch.cat([{x}, {w}.expand({x}.shape)], -1)",
            f"{x} - {w}.mean()",
            f"{w}.cumsum(0) * {x}",
            f"{x} * {w}[0]",
            f"{x} / {w}.norm()",
            f"torch.outer({w}, {w})",
            f"{x} @ torch.diag({w})",
            f"{x} @ {w}",
            f"{x} * {w}.detach()",
        )
    )


def _buffer(p: Pick) -> Text:
    x, _ = p.with_fixed()
    n = p.fixed(x, -1)
    form = p.one(("vector", "table", "mask", "index", "constant"))
    if form == "vector":
        return f"{x} * {p.buffer(f'torch.randn({n})')}"
    if form == "table":
        t = p.buffer(f"torch.randn(16, {n})")
        return p.one(
            (
                f"{x} + {t}[:{x}.shape[1]]",
                f"{x} + {t}[None, :{x}.shape[1], :]",
                f"{x} + {t}[torch.arange({x}.shape[1])]",
            )
        )
    if form == "mask":
        return f"{x}.masked_fill({p.buffer(f'(torch.arange({n}) % 2 == 0)', wide=False)}, 0.5)"
    if form == "index":
        return f"{x}[..., {p.buffer(f'torch.arange({n}).flip(0)', wide=False)}]"
    numbers = ", ".join(str(k / 4 - 1) for k in range(n))
    return f"{x} * torch.tensor([{numbers}], dtype={x}.dtype)"


def _made(p: Pick) -> Text:
    x, _ = p.with_fixed()
    n, s = p.fixed(x, -1), p.size(x, 1 if p.rank(x) > 1 else 0)
    return p.one(
        (
            f"{x} + torch.arange({n})",
            f"{x} * torch.arange({n}, dtype={x}.dtype)",
            f"{x} + torch.zeros({n})",
            f"{x} * torch.full(({n},), 0.5)",
            f"{x} @ torch.eye({n}, dtype={x}.dtype)",
            f"{x} + torch.ones({s}, {n})",
            f"{x} + torch.arange({s}).unsqueeze(-1)",
            f"torch.arange({s}) < 3",
            f"{x} * torch.linspace(0, 1, {n}).double().round()",
            f"{x}.new_ones({s}, {n}).tril() * {x}",
            f"torch.ones({s}, {s}, dtype=torch.bool).tril()",
            f"torch.arange(1, {s} + 1)",
            f"torch.arange(0, {n}, 2)",
            f"torch.zeros({s}, {s}).fill_diagonal_(1)",
            f"torch.arange({s}).view(-1, 1) >= torch.arange({s})",
            f"torch.full(({s}, {s}), -1e3, dtype={x}.dtype).triu(1)",
            f"torch.eye({n}, dtype=torch.bool)",
            f"torch.tril_indices({n}, {n})[0]",
            f"{x}.new_zeros({x}.shape[0], 1, {n}) + {x}",
            f"torch.arange({s}, device={x}.device)[None, :]",
            f"torch.outer(torch.arange({s}).double(), torch.arange({n}).double()).cos()",
            f"torch.triu(torch.ones({s}, {s}), diagonal=1).bool()",
        )
    )


def _indexed(p: Pick) -> Text:
    x = p.f(2)
    i = p.i()
    n = p.fixed(x, -1)
    near = f"({i} % {n})"
    forms = (
        f"F.embedding({i} % 16, {p.param(16, 8)})",
        f"{p.module('nn.Embedding(16, 8)')}({i} % 16)",
        f"F.embedding({i} % 16, {p.param(16, 8)}, padding_idx=2)",
        f"F.one_hot({near}, {n})",
        f"{p.param(16, 8)}[{i} % 16]",
        f"{x}.gather(-1, {near}.unsqueeze(-1))",
        f"{x}.gather(1, {i} % {x}.shape[1])",
        f"F.one_hot({near}, {n}).double() * {x}",
        f"{x}.scatter(-1, {near}.unsqueeze(-1), 1.5)",
        f"torch.take_along_dim({x}, {near}.unsqueeze(-1), -1)",
        f"{x}.scatter_add(-1, {near}.unsqueeze(-1), {x})",
        f"{x}[..., {near}[0]]",
        f"{p.param(n, 4)}.index_select(0, {near}[0])",
        f"{x}.scatter(-1, {near}.unsqueeze(-1), {x})",
        f"torch.bincount({near}.flatten(), minlength={n})",
        f"torch.zeros({n}, dtype={x}.dtype).scatter_add(0, {near}.flatten(), {x}[..., 0].flatten())",
        f"{x}[torch.arange({x}.shape[0]), {i}[:, 0] % {x}.shape[1]]",
        f"{p.param(16, 8)}.take({i} % 16)",
        f"torch.zeros_like({x}).scatter_(-1, {near}.unsqueeze(-1), 1.0)",
        f"F.embedding_bag({i} % 16, {p.param(16, 8)})",
        f"{x}.index_add(1, {i}[0] % {x}.shape[1], {x})",
        f"torch.searchsorted(torch.arange(8), {i})",
        f"{i}.double().histc(4, 0, 16)",
    )
    return p.one(forms)


def _heads(p: Pick) -> Text:
    """Attention as models write it: projections, heads, a mask."""
    x = p.f(3, 3)
    n = p.fixed(x, -1)
    heads, of_keys, size = p.one(((2, 2, 4), (4, 2, 4), (4, 1, 2), (4, 4, 2)))
    bias = ", bias=False" if p.flag() else ""
    q, k, v = (p.module(f"nn.Linear({n}, {h * size}{bias})") for h in (heads, of_keys, of_keys))
    o = p.module(f"nn.Linear({heads * size}, {n})")
    split = "{}({}).unflatten(-1, (-1, {})).transpose(1, 2)"
    lines = [f"q, k, v = {', '.join(split.format(m, x, size) for m in (q, k, v))}"]
    more = p.one((", is_causal=True", "", ", scale=0.3", "mask", "bias", "written out"))
    if more == "mask":
        lines += [f"near = torch.ones({x}.shape[1], {x}.shape[1], dtype=torch.bool).tril()"]
        more = ", attn_mask=near"
    if more == "bias":
        lines += [f"near = torch.arange({x}.shape[1], dtype={x}.dtype)"]
        more = ", attn_mask=near - near[:, None]"
    if heads != of_keys and (more == "written out" or p.flag()):
        lines += [f"k, v = (t.repeat_interleave({heads // of_keys}, dim=1) for t in (k, v))"]
    elif heads != of_keys:
        more += ", enable_gqa=True"
    if more == "written out":
        lines += [
            f"scores = q @ k.transpose(-1, -2) / {size**0.5}",
            f"ahead = torch.ones({x}.shape[1], {x}.shape[1], dtype=torch.bool).triu(1)",
            'out = scores.masked_fill(ahead, float("-inf")).softmax(-1) @ v',
        ]
    else:
        lines += [f"out = F.scaled_dot_product_attention(q, k, v{more})"]
    return [*lines, f"{{out}} = {x} + {o}(out.transpose(1, 2).flatten(2))"]


def _module(p: Pick) -> Text:
    """Modules of torch.nn as a whole."""
    x = p.f(3, 3)
    n = p.fixed(x, -1)
    form = p.one(
        ("mlp", "encoder", "attention", "conv", "lstm", "gru", "conv module", "transposed", "bilinear", "depthwise")
    )
    if form == "mlp":
        inner = p.module(
            f"nn.Sequential(nn.Linear({n}, 16), nn.{p.one(('ReLU', 'GELU', 'SiLU', 'Tanh'))}(), nn.Linear(16, {n}))"
        )
        return f"{x} + {inner}({x})"
    if form == "encoder":
        more = ", norm_first=True" if p.flag() else ""
        return f"{p.module(f'nn.TransformerEncoderLayer({n}, 2, 16, 0.0, batch_first=True{more})')}({x})"
    if form == "attention":
        return f"{p.module(f'nn.MultiheadAttention({n}, 2, batch_first=True)')}({x}, {x}, {x}, need_weights=False)[0]"
    if form in ("lstm", "gru"):
        return f"{p.module(f'nn.{form.upper()}({n}, 4, batch_first=True)')}({x})[0]"
    if form == "bilinear":
        return f"{p.module(f'nn.Bilinear({n}, {n}, 4)')}({x}, {x})"
    kernel = p.one((1, 2, 3))
    if form == "transposed":
        return f"{p.module(f'nn.ConvTranspose1d({n}, 4, {kernel})')}({x}.mT).mT"
    more = p.one(("", ", padding=1", ", stride=2", ', padding="same"', ", dilation=2", ", bias=False"))
    groups = f", groups={n}" if form == "depthwise" else ""
    out = n if form == "depthwise" else p.one((8, 4))
    return f"{p.module(f'nn.Conv1d({n}, {out}, {kernel}{more}{groups})')}({x}.mT).mT"


def _in_place(p: Pick) -> Text:
    """Ops that change a tensor: one that the program has just made, a view of it, or one that others hold too."""
    x = p.f()
    y = p.partner(x)
    mask = p.condition(x)
    start = p.one(
        (
            f"{{out}} = {x} * 1",
            f"{{out}} = {x}.clone()",
            f"{{out}} = {x} + {y}",
            f"{{out}} = torch.zeros_like({x})",
            f"{{out}} = {x}",
        )
    )
    c = p.number()
    change = p.one(
        (
            f"{{out}}.add_({y})",
            f"{{out}} += {y}",
            f"{{out}} *= {c}",
            f"{{out}}.mul_({y})",
            f"{{out}}.masked_fill_({mask}, {c})",
            "{out}.relu_()",
            "{out}.clamp_(-1, 1)",
            f"{{out}}[..., :2] = {c}",
            f"{{out}}[:, 0] = {c}",
            f"{{out}}[..., 1:] += {c}",
            f"{{out}}[:, 1:] = {x}[:, :-1].clone()",  # `out` may be `x`
            f"{{out}}[{mask}] = {c}",
            "{out}.zero_()",
            f"{{out}}.copy_({y})",
            "{out}.exp_()",
            f"{{out}}[..., ::2] = {x}[..., ::2].sin()",
            f"{{out}}[..., 0].mul_({c})",
            f"{{out}}[:, :1].fill_({c})",
            "{out}.tanh_()",
            f"{{out}}.sub_({y}, alpha=2)",
            "{out}.div_(2)",
            "{out}.unsqueeze_(0)",
            "{out}.t_()",
            f"{{out}}.index_fill_(-1, torch.tensor([1]), {c})",
            f"{{out}}[:, -1] += {y}",
            f"{{out}}.addcmul_({x}, {x})",
            "{out} -= {out}.mean(-1, keepdim=True)",
            "F.relu({out}, inplace=True)",
            "{out}.squeeze_(-1)",
            "{out}[..., 0] = {out}[..., 1]",
            f"{{out}}.scatter_(-1, {x}.argmax(-1, keepdim=True), {c})",
            "{out}.neg_()",
            f"{{out}}.lerp_({x}, 0.5)",
            "{out}.data.mul_(2)",
            "{out}.cumsum_(-1)",
            "{out}.pow_(2)",
            "{out}.sigmoid_()",
            f"{{out}}[0] = {c}",
        )
    )
    after = p.one(([], [f"{{out}} = {{out}} + {x}"], ["{out} = {out} * 2"]))
    return [start, change, *after]


def _views_written(p: Pick) -> Text:
    """A tensor filled slice by slice, and a view that is changed while others hold the whole."""
    x, _ = p.with_fixed()
    n = p.fixed(x, -1)
    k = p.whole(1, max(1, n - 1))
    alloc = p.one(
        (f"torch.empty_like({x})", f"torch.zeros_like({x})", f"{x}.new_zeros({x}.shape)", f"{x}.new_empty({x}.shape)")
    )
    forms = (
        [f"{{out}} = {alloc}", f"{{out}}[..., :{k}] = {x}[..., :{k}]", f"{{out}}[..., {k}:] = {x}[..., {k}:] * 2"],
        [f"{{out}} = {alloc}", f"{{out}}[:, 1:] = {x}[:, :-1]", "{out}[:, 0] = 0.5"],
        [f"{{out}} = {x} * 1", f"part = {{out}}[..., :{k}]", "part.mul_(2)", f"{{out}} = {{out}} + {x}"],
        [f"{{out}} = {x} * 1", "part = {out}.transpose(-1, -2)", "part += 1"],
        [f"whole = {x} * 1", "{out} = whole.view(-1)", "whole.add_(1)"],
        [
            f"{{out}} = {alloc}",
            f"{{out}}[..., 0::2] = {x}[..., 0::2].cos()",
            f"{{out}}[..., 1::2] = {x}[..., 0::2].sin()",
        ],
        [f"{{out}} = {x} * 1", "old = {out}", "old.mul_(3)", "{out} = {out} + old"],
        [f"{{out}} = {x} * 1", "first, second = {out}.chunk(2, -1)", "first += second"],
    )
    return p.one(forms)


def _control(p: Pick) -> Text:
    """Python around tensors: loops, regions without gradient, checkpoints, closures."""
    x = p.f()
    forms = (
        ["with torch.no_grad():", f"    scale = {x}.abs().mean()", f"{{out}} = {x} / (scale + 1)"],
        [f"{{out}} = {x}", "for k in range(3):", f"    {{out}} = {{out}} * 0.5 + {x}"],
        [f"{{out}} = {x} * 2 if {x}.shape[0] > 0 else {x}"],
        [f"{{out}} = sum([{x} * k for k in range(3)])"],
        [f"{{out}} = torch.utils.checkpoint.checkpoint(lambda t: t.sin() * t, {x}, use_reentrant=False)"],
        ["with torch.no_grad():", f"    {{out}} = {x} * 2"],
        [f"{{out}} = {x} + ({x} > 0).double() - {x}.detach()"],
        [f"{{out}} = {x} if self.training else -{x}"],
        [f"{{out}} = torch.cat([part * k for k, part in enumerate({x}.split(2, dim=-1))], -1)"],
        [f"{{out}} = torch.stack([{x}[:, k] for k in range(2)], 1)"],
        [f"assert {x}.shape[0] > 1", f"{{out}} = {x}.sin()"],
        [f"{{out}} = {x} * (2 if {x}.shape[1] > 4 else 3)"],
        [f"{{out}} = F.softmax({x} - {x}.amax(-1, keepdim=True).detach(), -1)"],
        ["with torch.enable_grad():", f"    {{out}} = {x}.cos()"],
        [f"{{out}} = torch.compile(lambda t: t.sin() + 1)({x})"],
    )
    return p.one(forms)


def _weighed(p: Pick) -> Text:
    """Return a value times numbers that differ by place, so that a permutation of it shows."""
    x = p.f()
    first, second = (tuple(t.shape) for t in p.scope.on_both(x))
    num = next((k for k in range(len(first)) if first[::-1][k] != second[::-1][k]), len(first))
    if not num:
        raise Unfit
    shape = ", ".join(map(str, first[len(first) - num :]))
    return f"{x} * {p.buffer(f'torch.randn({shape})')}"


OPERATIONS: Mapping[str, Operation] = {
    "unary": _filled(_UNARY, x=Pick.f),
    "scalar": _filled(_SCALAR, x=Pick.f, c=lambda p: str(p.number())),
    "binary": _both(_BINARY),
    "linear": _linear,
    "reduced": _along(_REDUCED, True),
    "along": _along(_ALONG, False),
    "whole": _filled(_WHOLE, x=lambda p: p.f(1)),
    "product": _product,
    "norm": _norm,
    "chosen": _chosen,
    "parameter": _parameter,
    "buffer": _buffer,
    "made": _made,
    "compared": _compared,
    "masks": _masks,
    "of masks": _filled(_OF_MASKS, m=Pick.m),
    "of numbers": _filled(_OF_NUMBERS, i=Pick.i),
    "indexed": _indexed,
    "heads": _heads,
    "module": _module,
    "in place": _in_place,
    "views written": _views_written,
    **{"control": _control, "weighed": _weighed},
}
