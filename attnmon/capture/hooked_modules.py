"""Which watched modules carry hooks in a measured step, and when these are away for a while or for good."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from attnmon.capture.coverage import Site
from attnmon.capture.fast_path import StockLayers, may_fuse
from attnmon.capture.frames import ActiveForwards
from attnmon.capture.hooks import AfterForward, BeforeForward, HookPair, Watcher, free_key
from attnmon.capture.sites import Watched


class HookedModules:
    """Makes the hooks of modules when they are first wanted, and puts them in and takes them out.

    Args:
        watched: the watched modules with their sites, by index.
        number: of the watcher, for operators in compiled graphs.
        running: what runs now; told which hooks are withheld.
    """

    def __init__(self, watched: Sequence[Watched], number: int, running: ActiveForwards) -> None:
        self._watched, self._number, self._running = watched, number, running
        self._sites = [site for _, site in watched]
        self._hooks: dict[int, HookPair] = {}
        self._attached: list[HookPair] = []
        self._withheld: list[HookPair] = []  # from a layer of torch that would take another path with them
        self._layers = StockLayers(watched)
        self._key = -1
        self._compiles = False  # something, in a measured step

    def choose(self, watcher: Watcher, wide: bool) -> None:
        """Decide which modules are hooked in the step that begins.

        Args:
            watcher: what hooks talk to.
            wide: every module that could make a call; otherwise those that made calls or look like attention.
        """
        wanted = [index for index, site in enumerate(self._sites) if self._wants_hook(index, site, wide)]
        self._attached, modules = [], []
        for index in wanted:
            module = self._watched[index][0]()
            assert module is not None
            if index not in self._hooks:
                pair = self._make(watcher, module, index)
                if pair is None:
                    continue
                self._hooks[index] = pair
            self._attached.append(self._hooks[index])
            modules.append(module)
        self._key = free_key(modules)

    def attach(self) -> None:
        """Put the chosen hooks in."""
        for pair in self._attached:
            pair.attach(self._key)

    def detach(self) -> None:
        """Take all hooks out."""
        self._withheld = []
        self._running.withheld.clear()
        for pair in self._hooks.values():
            pair.detach()

    def clear(self) -> None:
        """Forget them all."""
        self._hooks.clear()
        self._attached = []

    def _make(self, watcher: Watcher, module: nn.Module, index: int) -> HookPair | None:
        site = self._sites[index]
        try:
            before = BeforeForward(watcher, index, site, self._number)
            return HookPair(module, before, AfterForward(watcher, index))
        except Exception as error:
            site.left_alone = f"it takes no hooks ({error})"
            return None

    def _wants_hook(self, index: int, site: Site, wide: bool) -> bool:
        module = self._watched[index][0]()
        if module is None or site.left_alone:
            return False
        layer = self._layers.layer_of(index)
        site.in_evaluation = not module.training and (layer is not None or isinstance(module, nn.MultiheadAttention))
        if layer is not None and not layer.training and self._compiles:
            return False  # a graph is traced with hooks or without, for good
        wanted = wide or site.expected or bool(site.seen or site.calls or site.refused)
        return wanted or index in self._layers.indices

    # -- away for a while -----------------------------------------------------------------------------------

    def withheld_for(self, index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Take hooks away from a layer of torch that could run fused, until it has chosen its path; whether it could.

        The layer counts the hooks of what is in it, too.
        """
        layer = self._layers.own(index)
        if layer is None or not may_fuse(layer, args, kwargs):
            return False
        for inner in self._layers.inside(index):
            pair = self._hooks.get(inner)
            if pair is not None and pair in self._attached:
                pair.detach()
                self._withheld.append(pair)
                self._running.withheld.append(inner)
        return True

    def restore(self) -> None:
        """Put back what was withheld."""
        if self._withheld:
            withheld, self._withheld = self._withheld, []
            self._running.withheld.clear()
            if self._running.active:
                for pair in withheld:
                    if pair in self._attached:
                        pair.attach(self._key)

    # -- away for good --------------------------------------------------------------------------------------

    def tracing_begins(self) -> None:
        """A graph is about to be traced: layers of torch in evaluation mode go on bare."""
        self._compiles = True
        for index, pair in self._hooks.items():
            layer = self._layers.layer_of(index)
            if layer is not None and not layer.training and pair in self._attached:
                self._drop(pair, self._sites[index])

    def leave_alone(self, modules: Sequence[nn.Module] | None, why: str) -> bool:
        """Drop the hooks of these modules, or of all; whether there were any.

        Args:
            modules: whose code failed; watched modules of the same classes run the same code.
            why: what coverage says of them.
        """
        inside = None if modules is None else self._like(modules)
        changed = False
        for index, (reference, site) in enumerate(self._watched):
            module = reference()
            if module is None or site.left_alone or (inside is not None and id(module) not in inside):
                continue
            pair = self._hooks.get(index)
            if pair is not None and pair in self._attached:
                changed = True
                site.left_alone = why
                self._drop(pair, site)
        return changed

    def _like(self, modules: Sequence[nn.Module]) -> set[int]:
        """Identities of all in these modules, and in watched ones of the same classes."""
        kinds = tuple({type(module) for module in modules})
        watched = [module for module in (reference() for reference, _ in self._watched) if type(module) in kinds]
        return {id(inner) for module in (*modules, *watched) if module is not None for inner in module.modules()}

    def _drop(self, pair: HookPair, site: Site) -> None:
        """Take a module's hooks out for good, and silence the modules around it.

        Without its hooks, a call that it makes could be taken for one of theirs.
        """
        pair.detach()
        self._attached.remove(pair)
        for index, outer in enumerate(self._sites):
            if outer is not site and (not outer.path or site.path.startswith(f"{outer.path}.")):
                outer.child_left_alone = True
                if index in self._hooks:
                    self._hooks[index].before.excluded = True
