"""Precision policies: ordered rules that say in which dtype modules and functional operations run."""

from collections.abc import Mapping

from torch import nn
from typing_extensions import override

from lightning_mp.ground.modules.names import named_modules, near_misses
from lightning_mp.ground.modules.stage_placeholder import full_model
from lightning_mp.training.policy.operations import FAMILIES, operation_of_module, operations_named
from lightning_mp.training.policy.resolved import PolicyModule, ResolvedPolicy
from lightning_mp.training.policy.rules import LOW, Dtype, PolicyRules, Rule, dtype_name, parse_rules


class PrecisionPolicy:
    r"""Ordered rules from a module or an operation to a dtype; the first that matches wins.

    A rule is a pair. On its left side::

        "model.blocks.0.*"          glob over the names of modules; * crosses dots
        "re:model\.blocks\.[01]"      regular expression for a module's full name
        nn.LayerNorm                every module of a class
        "class:*RMSNorm"            the same by the name of the class or of a base class
        "softmax", "op:cumsum"      a functional operation, however it is called (F.softmax, Tensor.softmax, ...)
        "norms"                     a family of operations: norms, softmaxes, losses, matmuls, fp32_only, fills

    Names of operations are those of torch's documentation, with dots or underscores: ``op:fft.rfft``, ``linalg_svd``.
    The family "fills" is about numbers that are too large for 16 bit, such as ``masked_fill(mask, -1e9)`` in fp16, and
    leaves other calls alone; a rule about "masked_fill" itself is about all calls. Operations in place
    (``masked_fill_``) have no rule: give their module one.
    If an operation and a module share a name, prefix it with "op:" or "module:". The right side is "fp32", "bf16",
    "fp16", a torch dtype, or "low": the 16-bit format of the plugin that applies the policy.

    Which rule applies:

    - A rule about a module covers everything inside it. If several rules cover a module, the first wins.
    - An fp32 module runs without autocast, so rules about operations do not apply inside it. A 16-bit module runs under
      autocast in that dtype, and the first rule that matches an operation wins.
    - Anything that no rule matches is left to autocast.

    While rules cast operations, ``dot``, ``cross``, ``index_put`` and others that autocast on CUDA promotes to the
    widest dtype of their inputs do so on every device type. ``lerp``, ``scatter`` and ``index_add`` do not, as on CUDA:
    torch refuses inputs of two dtypes there.

    Rules about modules act on ``forward``; other methods that are called directly are not covered. Rules about
    operations do not apply inside scripted functions. ``F.linear_cross_entropy``, a matmul and a loss in one, belongs
    to no family.

    Cost: an fp32 module or operation casts its 16-bit inputs up, and its output takes 4 bytes per element. Rules about
    operations are free on device types whose autocast already does the same; elsewhere they cost about a microsecond
    per torch call, and nothing when compiled.

    Args:
        rules: pairs, or a mapping of pattern to dtype.

    Raises:
        ValueError: if a rule cannot be read, or can never win.
        TypeError: if the rules are neither a mapping nor pairs.

    Example:
        >>> policy = PrecisionPolicy([("head", "fp32"), *PrecisionPolicy.default().rules])
        >>> model = nn.ModuleDict({"body": nn.Linear(4, 4), "head": nn.Linear(4, 2)})
        >>> print(policy.resolve(model))
        what                                                            rule              dtype
        ----------------------------------------------------------------------------------------------------
        head                                                            1 'head'          fp32
        layer_norm, group_norm, rms_norm, local_response_norm           2 'op:norms'      fp32
        softmax, log_softmax, softmin, gumbel_softmax, logsumexp        3 'op:softmaxes'  fp32
        losses: cross_entropy, nll_loss, mse_loss, l1_loss and 17 more  4 'op:losses'     fp32
        fp32_only: fft_fft, fft_rfft, fft_hfft, fft_ifft and 56 more    5 'op:fp32_only'  fp32
        fills: masked_fill, index_fill, full_like, new_full and 3 more  6 'op:fills'      fp32
        matmuls: linear, matmul, mm, bmm and 14 more                    7 'op:matmuls'    low
        everything else                                                 -                 as autocast has it
    """

    def __init__(self, rules: PolicyRules) -> None:
        self.rules: tuple[Rule, ...] = parse_rules(rules)
        self._operations = _resolve_operations(self.rules)

    @classmethod
    def default(cls) -> "PrecisionPolicy":
        """Norms, softmax and losses in fp32, matrix products and attention in 16 bit, on every device type.

        In fp32 as well: what torch has no 16-bit kernels for ("fp32_only"), and calls of "fills" whose number is too
        large for the format.

        Matrix-vector products (``mv``, ``addmv``) stay in fp32 on CPUs, as under torch's CPU autocast.
        """
        fp32 = ("op:norms", "op:softmaxes", "op:losses", "op:fp32_only", "op:fills")
        return cls([*((family, "fp32") for family in fp32), ("op:matmuls", LOW)])

    @override
    def __repr__(self) -> str:
        from lightning_mp.ground.core.misplaced_parts import place_hint  # of use in errors only

        rules = ", ".join(f"({rule.text!r}, {dtype_name(rule.dtype)!r})" for rule in self.rules)
        return f"PrecisionPolicy([{rules}]){place_hint(self, 'a policy: use AutocastPrecision(..., policy=...)')}"

    @property
    def dtypes(self) -> frozenset[Dtype]:
        """Every dtype that a rule requests."""
        return frozenset(rule.dtype for rule in self.rules)

    @property
    def names_modules(self) -> bool:
        """Whether a rule keeps modules from the 16-bit format of the plugin that applies the policy."""
        return any(rule.kind != "op" and rule.dtype != LOW for rule in self.rules)

    def resolve(self, model: nn.Module) -> "ResolvedPolicy":
        """Finds what each rule matches in a model (on a pipeline stage, in the whole model); changes nothing.

        Raises:
            ValueError: if a rule matches nothing, is about both an operation and a module, or can never win.
        """
        with full_model(model):
            names = list(named_modules(model))
        winners = _first_rules(self.rules, names)
        for number, rule in enumerate(self.rules):
            _check_against_model(number, rule, self.rules, names, winners)
        modules = []
        seen: set[int] = set()
        for name, module in names:
            if id(module) in seen:
                continue
            seen.add(id(module))
            winner = winners.get(id(module))
            has_parameters = next(module.parameters(recurse=False), None) is not None
            modules.append(
                PolicyModule(
                    name,
                    type(module).__name__,
                    operation_of_module(module),
                    has_parameters,
                    winner,
                    self.rules[winner].dtype if winner is not None else None,
                )
            )
        return ResolvedPolicy(self.rules, tuple(modules), self._operations)


PolicyLike = PrecisionPolicy | Mapping[str, str]
"""A policy, or its rules as a mapping of pattern to dtype, as written in YAML."""


def _resolve_operations(rules: tuple[Rule, ...]) -> Mapping[str, int]:
    """Number of the first rule about each operation."""
    first: dict[str, int] = {}
    for number, rule in enumerate(rules):
        for operation in rule.operations:
            first.setdefault(operation, number)
        taken = {first[operation] for operation in rule.operations}
        if taken and number not in taken and any(rules[other].dtype != rule.dtype for other in taken):
            raise ValueError(_never_wins(number, rule, rules, taken))
    return first


def _first_rules(rules: tuple[Rule, ...], names: list[tuple[str, nn.Module]]) -> dict[int, int]:
    """Number of the first rule that covers each module, by the module's id; a module may have several names."""
    by_name: dict[str, int] = {}
    by_module: dict[int, int] = {}
    for name, module in names:
        covering = [number for number, rule in enumerate(rules) if rule.matches(name, module)][:1]
        if name and (inherited := by_name.get(name.rpartition(".")[0])) is not None:
            covering.append(inherited)
        if covering:
            by_name[name] = min(covering)
            by_module[id(module)] = min(by_name[name], by_module.get(id(module), by_name[name]))
    return by_module


def _check_against_model(
    number: int, rule: Rule, rules: tuple[Rule, ...], names: list[tuple[str, nn.Module]], winners: Mapping[int, int]
) -> None:
    if rule.kind == "op":
        if rule.bare and any(name == rule.pattern for name, _ in names):
            raise ValueError(
                f"Rule {number + 1} of the policy, {rule}, is about an operation, but the model also has a module of"
                f" that name. Write 'op:{rule.text}' or 'module:{rule.text}'."
            )
        return
    matched = [module for name, module in names if rule.matches(name, module)]
    if not matched:
        classes = [type(module).__name__ for _, module in names]
        candidates = [f"class:{name}" for name in classes] if rule.kind == "class" else [name for name, _ in names]
        if rule.kind == "module":
            candidates = [*candidates, *FAMILIES, *(f"class:{name}" for name in classes)]
        pattern = rule.pattern if isinstance(rule.pattern, str) else rule.pattern.__name__
        operation = f" For torch's operation of that name write 'op:{pattern}'." if operations_named(pattern) else ""
        raise ValueError(
            f"Rule {number + 1} of the policy, {rule}, matches none of the model's {len(names)} modules."
            f"{near_misses(pattern, candidates)} Names are those of model.named_modules().{operation}"
        )
    taken = {winners[id(module)] for module in matched}
    if number not in taken and any(rules[other].dtype != rule.dtype for other in taken):
        raise ValueError(_never_wins(number, rule, rules, taken))


def _never_wins(number: int, rule: Rule, rules: tuple[Rule, ...], taken: set[int]) -> str:
    earlier = ", ".join(f"{other + 1} ({rules[other]})" for other in sorted(taken))
    return (
        f"Rule {number + 1} of the policy, {rule}, can never win: everything it matches is taken by rule {earlier}."
        " The first rule wins: move this one up, or leave it out."
    )
