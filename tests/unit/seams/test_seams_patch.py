from __future__ import annotations

import copy
import importlib
import os
import pkgutil
import tomllib
import types
from importlib import resources

import pytest

from simpletuner_gh200.config.settings import resolve
from simpletuner_gh200.errors import FeatureUnavailable, OwnershipError, SeamMismatch
from simpletuner_gh200.seams import points
from simpletuner_gh200.seams.feature import Feature, all_features
from simpletuner_gh200.seams.patch import Patch, Patches, put, wrap_method
from simpletuner_gh200.seams.runtime import Launch, Runtime
from simpletuner_gh200.seams.seam import InstalledSeam, Seam, parameter_names, verify
from simpletuner_gh200.upstream.features import ON, Status
from simpletuner_gh200.upstream.spec import SeamSpec


def make_owner():
    class Base:
        def inherited(self, a):
            return ("base", a)

    class Owner(Base):
        def own(self, a, *, b=1):
            """Own words."""
            return ("own", a, b)

        @staticmethod
        def static(a):
            return ("static", a)

    return Owner


def louder(wrapped, instance, args, kwargs):
    return ("louder", *wrapped(*args, **kwargs))


@pytest.mark.parametrize("name", ["own", "inherited", "static"])
def test_install_and_uninstall_leave_no_trace(name):
    owner = make_owner()
    before = dict(vars(owner))
    patch = wrap_method(owner, name, louder)
    patch.install()
    patch.install()
    assert getattr(owner(), name)(5)[0] == "louder"
    assert getattr(owner(), name)(5).count("louder") == 1
    patch.uninstall()
    patch.uninstall()
    assert dict(vars(owner)) == before
    assert getattr(owner(), name)(5)[0] != "louder"


def test_signature_and_words_of_the_original_stay_visible():
    owner = make_owner()
    wrap_method(owner, "own", louder).install()
    assert parameter_names(owner.own) == ("self", "a", "b")
    assert owner.own.__doc__ == "Own words."


def test_someone_elses_patch_on_top_is_not_destroyed():
    owner = make_owner()
    patch = wrap_method(owner, "own", louder)
    patch.install()
    theirs = lambda self: "theirs"  # noqa: E731
    owner.own = theirs
    with pytest.raises(OwnershipError, match=r"Owner\.own"):
        patch.uninstall()
    assert owner.own is theirs


def test_registry_entries_come_and_go():
    registry = {"kept": 1}
    new, replaced = put(registry, "new", 2), put(registry, "kept", 3)
    new.install()
    replaced.install()
    assert registry == {"kept": 3, "new": 2}
    replaced.uninstall()
    new.uninstall()
    assert registry == {"kept": 1}
    new.install()
    registry["new"] = 9
    with pytest.raises(OwnershipError):
        new.uninstall()


def test_an_object_is_wrapped_alone_and_left_as_it_was():
    owner = make_owner()
    mine, other = owner(), owner()
    patches = Patches()
    patches.install(wrap_method(mine, "own", louder))
    assert mine.own(5)[0] == "louder"
    assert other.own(5)[0] == "own"
    assert parameter_names(mine.own) == ("a", "b")
    assert copy.deepcopy(mine).own(5)[0] == "louder", "others may copy what we wrapped"
    patches.remove()
    assert vars(mine) == {}


def test_who_wrapped_ours_since_keeps_his_and_ours_passes_on():
    mine = make_owner()()
    patches = Patches()
    patches.install(wrap_method(mine, "own", louder))
    ours = mine.own
    mine.own = lambda *args: ("theirs", *ours(*args))
    assert mine.own(5)[:3] == ("theirs", "louder", "own")
    patches.remove()
    assert mine.own(5)[:2] == ("theirs", "own")


def test_patches_are_installed_all_or_none_and_taken_out_newest_first():
    owner = make_owner()
    before = dict(vars(owner))
    patches = Patches()
    with pytest.raises(RuntimeError, match="no"):
        patches.install(wrap_method(owner, "own", louder), Patch(owner, "static", broken))
    assert dict(vars(owner)) == before
    patches.install(wrap_method(owner, "own", louder), wrap_method(owner, "own", louder))
    assert owner().own(5)[:3] == ("louder", "louder", "own")
    patches.uninstall()
    assert dict(vars(owner)) == before


def test_what_is_not_ours_any_more_is_said_once_for_all():
    owner, registry = make_owner(), {}
    patches = Patches()
    patches.install(wrap_method(owner, "own", louder), put(registry, "key", 1), put(owner, "extra", 2))
    owner.own, registry["key"] = None, 3
    with pytest.raises(OwnershipError, match=r"dict\.key.*Owner\.own"):
        patches.uninstall()
    assert not hasattr(owner, "extra"), "the others were taken out all the same"


def broken(original):
    raise RuntimeError("no")


def test_upstream_exceptions_pass_through_unmodified():
    class Peculiar(Exception):
        pass

    class Owner:
        def fails(self):
            raise Peculiar("as it was")

    wrap_method(Owner, "fails", lambda wrapped, instance, args, kwargs: wrapped(*args, **kwargs)).install()
    with pytest.raises(Peculiar, match="as it was") as caught:
        Owner().fails()
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def spec(**changes):
    values = {
        "name": "test.seam",
        "module": "m",
        "qualname": "Owner.own",
        "parameters": ("self", "a", "b"),
        "features": ("store",),
        "reason": "",
    }
    return SeamSpec(**{**values, **changes})


def module_with(owner):
    module = types.ModuleType("m")
    module.Owner = owner
    return module


def test_verify_accepts_what_it_knows_and_names_what_it_finds():
    module = module_with(make_owner())
    assert verify(spec(), module) is module.Owner.own
    with pytest.raises(SeamMismatch, match=r"found Owner\.own\(self, a, b\); expected Owner\.own\(self, a\)"):
        verify(spec(parameters=("self", "a")), module)
    with pytest.raises(SeamMismatch, match=r"found no Owner\.gone in m"):
        verify(spec(qualname="Owner.gone"), module)


def test_a_mismatch_patches_nothing_and_is_remembered():
    owner = make_owner()
    before = dict(vars(owner))
    seam = InstalledSeam(
        Seam("test.seam", lambda m, r: [wrap_method(m.Owner, "own", louder)], spec(parameters=("self",)))
    )
    seam.install(module_with(owner), Runtime(Launch()))
    assert dict(vars(owner)) == before
    assert seam.status.text().startswith("off: seam 'test.seam' does not match")


def test_something_gone_beside_the_seam_does_not_break_upstreams_import():
    seam = InstalledSeam(Seam("test.seam", lambda module, runtime: [module.gone], spec()))
    seam.install(module_with(make_owner()), Runtime(Launch()))
    assert seam.status.text().startswith("off: AttributeError")


def test_closing_happens_once_and_only_in_the_process_that_started(runtime):
    closed = []
    Wanted.close = lambda self: closed.append(os.getpid())
    try:
        runtime.seams["trainer.train"].status = ON
        runtime.configure(resolve({}, {}))
        runtime._pid += 1
        runtime.close()
        assert closed == []
        runtime._pid -= 1
        runtime.close()
        runtime.close()
        assert closed == [os.getpid()]
    finally:
        del Wanted.close


class Wanted(Feature):
    name = "ramp"
    answer = "requested"

    def request(self, settings, environment):
        return self.answer

    def before_train(self, trainer):
        trainer.append("before")


@pytest.fixture
def runtime():
    runtime = Runtime(Launch())
    feature = Wanted()
    feature.runtime = runtime
    runtime.features = (feature,)
    return runtime


def test_without_its_seam_a_feature_asked_for_stops_the_run_and_one_on_auto_is_off(runtime, monkeypatch):
    runtime.seams["trainer.train"].status = Status("changed")
    with pytest.raises(FeatureUnavailable, match=r"'ramp'.*trainer\.train: off: changed"):
        runtime.configure(resolve({}, {}))
    monkeypatch.setattr(Wanted, "answer", "auto")
    runtime.configure(resolve({}, {}))
    assert str(runtime.statuses["ramp"]) == "off: trainer.train: off: changed"
    assert runtime.moment("before_train") == ()
    monkeypatch.setattr(Wanted, "answer", "off")
    runtime.configure(resolve({}, {}), verdict=lambda: pytest.fail("the source is not looked at for nothing"))
    assert str(runtime.statuses["ramp"]) == "off: not asked for"


def test_what_the_source_check_says_counts_as_well(runtime, monkeypatch):
    runtime.seams["trainer.train"].status = ON
    verdict = {"ramp": Status("seam trainer.train: two accumulate blocks")}
    with pytest.raises(FeatureUnavailable, match="two accumulate blocks"):
        runtime.configure(resolve({}, {}), verdict=lambda: verdict)
    monkeypatch.setattr(Wanted, "answer", "auto")
    runtime.configure(resolve({}, {}), verdict=lambda: verdict)
    assert str(runtime.statuses["ramp"]) == "off: seam trainer.train: two accumulate blocks"


def test_moments_reach_only_features_that_are_on_and_override_them(runtime):
    runtime.seams["trainer.train"].status = ON
    runtime.configure(resolve({}, {}))
    calls = []
    runtime.call("before_train", calls)
    assert calls == ["before"]
    assert runtime.moment("after_train") == ()
    runtime.switch_off(runtime.features[0], "because")
    runtime.call("before_train", calls)
    assert calls == ["before"]
    assert str(runtime.statuses["ramp"]) == "off: because"


def test_what_a_feature_builds_on_counts_where_it_is_off_and_not_where_it_is_still_to_come(runtime):
    runtime.seams["trainer.train"].status = ON
    runtime.configure(resolve({}, {}))
    assert runtime.feature_on("ramp"), "modules that nobody has imported yet speak against nothing"
    runtime.seams["trainer.init_hooks"].status = Status("changed")
    with pytest.raises(FeatureUnavailable, match=r"'ramp'.*trainer\.init_hooks: off: changed"):
        runtime.configure(resolve({}, {}))


def test_what_lies_outside_the_contract_speaks_against_no_feature(runtime):
    runtime.seams["trainer.train"].status = ON
    for name in ("torch.pin_memory", "simpletuner.gh200"):
        runtime.seams[name].status = Status("odd")
    runtime.configure(resolve({}, {}))
    assert runtime.feature_on("ramp")


def test_the_end_comes_in_reverse(runtime, monkeypatch):
    ended = []

    class Second(Wanted):
        name = "hints"

        def after_train(self, trainer):
            ended.append("second")

    monkeypatch.setattr(Wanted, "after_train", lambda self, trainer: ended.append("first"), raising=False)
    second = Second()
    second.runtime = runtime
    runtime.features = (*runtime.features, second)
    for seam in runtime.seams.values():
        seam.status = ON
    runtime.configure(resolve({}, {}))
    runtime.unwind("after_train", None)
    assert ended == ["second", "first"]


def test_a_place_and_what_we_put_there_stand_in_files_of_the_same_name():
    """One file per upstream module on either side: who reads one of them knows where the other is."""
    folder = resources.files("simpletuner_gh200.upstream") / "contract"
    where = {name: file.name for file in folder.glob("*.toml") for name in tomllib.loads(file.read_text())}
    for info in pkgutil.iter_modules(points.__path__):
        for seam in importlib.import_module(f"{points.__name__}.{info.name}").SEAMS:
            assert where.get(seam.name) == f"{info.name}.toml" or seam.own_spec is not None, seam.name


def test_a_feature_that_the_support_table_does_not_know_is_refused(monkeypatch):
    monkeypatch.setattr("simpletuner_gh200.seams.feature.FEATURES", {})
    with pytest.raises(TypeError, match="FEATURES"):
        all_features()
