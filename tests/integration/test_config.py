"""Options: where they come from, what a bad one says, what is passed on to Inductor."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest

from fa_inductor.config import Options
from fa_inductor.errors import FaInductorError, OptionError


def test_defaults() -> None:
    options, inductor = Options.from_user(None)
    assert options == Options()
    assert options.enabled
    assert options.dropout
    assert not options.strict
    assert not options.verify
    assert (options.min_seqlen, options.kernel, options.fp8, options.log_level) == (None, "auto", "off", None)
    assert inductor == {}


def test_ours_are_taken_and_inductors_are_passed_on() -> None:
    given = {
        "strict": True,
        "min-seqlen": 64,
        "max_autotune": True,
        "triton.cudagraphs": False,
        "epilogue-fusion": False,
    }
    before = dict(given)
    options, inductor = Options.from_user(given)
    assert options == Options(strict=True, min_seqlen=64)
    assert inductor == {"max_autotune": True, "triton.cudagraphs": False, "epilogue_fusion": False}
    assert given == before, "the caller's mapping must not change"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"strct": True}, "unknown option 'strct'. Did you mean 'strict'?"),
        ({"Verify": True}, "Did you mean 'verify'?"),
        ({"max_autotun": True}, "Did you mean 'max_autotune'"),
        ({"triton.cudagraph": True}, "Did you mean 'triton.cudagraphs'"),
        ({"qqqqq": 1}, "fa_inductor's options are enabled, strict, verify"),
        ({"strict": 1}, "strict: got 1 of type int, expected True or False"),
        ({"strict": "true"}, "strict: got 'true' of type str"),
        ({"dropout": None}, "dropout: got None of type NoneType"),
        ({"min_seqlen": -1}, "min_seqlen: got -1 of type int, expected None or an integer >= 0"),
        ({"min_seqlen": True}, "min_seqlen: got True of type bool"),
        ({"min_seqlen": 2.0}, "min_seqlen: got 2.0 of type float"),
        ({"kernel": "referense"}, "(did you mean 'reference'?)"),
        ({"kernel": None}, "kernel: got None of type NoneType, expected 'auto' or 'general' or 'reference' or 'aten'"),
        ({"log_level": "info"}, "log_level: got 'info' of type str"),
        ({"fp8": "e5m2"}, "fp8: got 'e5m2' of type str, expected 'off' or 'e4m3' or 'e4m3-rotated' or 'int8-e4m3'"),
        ({"max_autotune": 3}, "Inductor option max_autotune: got 3 of type int, expected bool"),
        ({3: 4}, "an option's name: got 3 of type int"),
    ],
)
def test_bad_options_are_named(given: dict, says: str) -> None:
    with pytest.raises(OptionError) as caught:
        Options.from_user(given)
    assert says in str(caught.value)
    assert isinstance(caught.value, FaInductorError)
    assert isinstance(caught.value, ValueError)


def test_not_a_mapping() -> None:
    with pytest.raises(OptionError, match="options: got \\['strict'\\] of type list"):
        Options.from_user(["strict"])  # type: ignore[arg-type]


def test_constructor_checks_too() -> None:
    with pytest.raises(OptionError, match="kernel: got 'x'"):
        Options(kernel="x")
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().strict = True  # type: ignore[misc]


@pytest.mark.parametrize(("text", "value"), [("1", True), ("on", True), ("YES", True), ("0", False), ("False", False)])
def test_environment_booleans(monkeypatch: pytest.MonkeyPatch, text: str, value: bool) -> None:
    monkeypatch.setenv("FA_INDUCTOR_VERIFY", text)
    assert Options.from_user()[0].verify is value


def test_environment_other_types_and_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA_INDUCTOR_MIN_SEQLEN", "512")
    monkeypatch.setenv("FA_INDUCTOR_KERNEL", "aten")
    monkeypatch.setenv("FA_INDUCTOR_FP8", "e4m3")
    monkeypatch.setenv("FA_INDUCTOR_STRICT", "")
    assert Options.from_user()[0] == Options(min_seqlen=512, kernel="aten", fp8="e4m3")
    assert Options.from_user({"min_seqlen": 3})[0].min_seqlen == 3, "what the user passes wins"
    assert Options() == Options(min_seqlen=None), "the constructor does not read the environment"


def test_environment_errors_name_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA_INDUCTOR_STRICT", "perhaps")
    with pytest.raises(OptionError, match="FA_INDUCTOR_STRICT: got 'perhaps'"):
        Options.from_user()
    monkeypatch.setenv("FA_INDUCTOR_STRICT", "1")
    monkeypatch.setenv("FA_INDUCTOR_MIN_SEQLEN", "-4")
    with pytest.raises(OptionError, match="FA_INDUCTOR_MIN_SEQLEN: got '-4'"):
        Options.from_user()


def test_unknown_environment_variable_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA_INDUCTOR_STRCT", "1")
    with pytest.warns(UserWarning, match="FA_INDUCTOR_STRCT is not one of fa_inductor's. Did you mean FA_INDUCTOR_STRICT"):
        Options.from_user()


@pytest.mark.parametrize("text", ["0", "off", "False"])
def test_switch_beats_everything(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("FA_INDUCTOR", text)
    monkeypatch.setenv("FA_INDUCTOR_ENABLED", "1")
    assert Options.from_user({"enabled": True})[0].enabled is False


def test_switch_that_is_not_understood_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA_INDUCTOR", "of")
    with pytest.warns(UserWarning, match="FA_INDUCTOR=of switches nothing off; 0 does. Did you mean FA_INDUCTOR=off?"):
        assert Options.from_user()[0].enabled


def test_switch_on_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FA_INDUCTOR", "1")
    assert Options.from_user({"enabled": False})[0].enabled is False


def test_key_covers_what_changes_a_graph_and_only_that() -> None:
    changed = {
        "enabled": False,
        "strict": True,
        "verify": True,
        "dropout": False,
        "min_seqlen": 7,
        "kernel": "reference",
        "fp8": "e4m3",
        "fp8_projection": True,
    }
    keys = {Options(**{name: value}).key() for name, value in changed.items()} | {Options().key()}
    assert len(keys) == len(changed) + 1
    assert Options(log_level="DEBUG").key() == Options().key()
    assert Options(min_seqlen=7).key() == Options.from_user({"min_seqlen": 7})[0].key()
    # Every option is either in the key or deliberately out of it.
    assert {f.name for f in dataclasses.fields(Options)} == {*changed, "log_level"}


def test_log_level_is_heard(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("fa_inductor")
    before = logger.level
    try:
        Options(log_level="DEBUG").apply_log_level()
        assert logger.level == logging.DEBUG
        Options().apply_log_level()
        assert logger.level == logging.DEBUG, "None leaves the level alone"
    finally:
        logger.setLevel(before)


def test_describe_lists_every_option() -> None:
    rows = Options.describe()
    assert [row[0] for row in rows] == [f.name for f in dataclasses.fields(Options)]
    assert all(variable == "FA_INDUCTOR_" + name.upper() and text for name, _, variable, text in rows)


def test_readme_lists_every_option() -> None:
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    for name, default, variable, _ in Options.describe():
        (row,) = [line for line in readme.splitlines() if line.startswith(f"| `{name}` |")]
        shown = f'"{default}"' if isinstance(default, str) else str(default)
        assert f"| `{shown}` |" in row
        assert f"`{variable}`" in row or name == "enabled"
