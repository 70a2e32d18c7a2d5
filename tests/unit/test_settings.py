"""Environment variables and errors: the two leaves everything imports."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mokgen import settings
from mokgen.errors import CompileError, UsageError


def test_settings_are_six_typed_variables():
    assert len(settings.VARIABLES) == 6
    assert [variable.name for variable in settings.VARIABLES if variable.affects_build] == ["MOKGEN_ARCH"]
    assert all(variable.name.startswith("MOKGEN_") for variable in settings.VARIABLES)


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        (settings.JOBS, "3", 3),
        (settings.ARCH, "sm_90a, sm_100a", ("sm_90a", "sm_100a")),
        (settings.KEEP, "1", True),
        (settings.OFFLINE, "false", False),
        (settings.LOG, "DEBUG", "debug"),
        (settings.CACHE_DIR, "/tmp/x", Path("/tmp/x")),
    ],
)
def test_settings_parse_and_scope_restores(variable, text, value):
    before = os.environ.get(variable.name)
    with settings.scope(**{variable.name: text}):
        assert variable.get() == value
    assert os.environ.get(variable.name) == before


@pytest.mark.parametrize(
    ("variable", "text"), [(settings.JOBS, "0"), (settings.JOBS, "x"), (settings.KEEP, "maybe"), (settings.LOG, "loud")]
)
def test_settings_refuse(variable, text):
    with settings.scope(**{variable.name: text}), pytest.raises(UsageError, match=variable.name):
        variable.get()


def test_empty_variables_are_unset():
    with settings.scope(MOKGEN_JOBS=""):
        assert settings.JOBS.get() >= 1


def test_errors_survive_pickling():
    import pickle

    error = pickle.loads(pickle.dumps(CompileError("what", "where", "hint")))
    assert (error.what, error.where, error.hint, error.exit_code) == ("what", "where", "hint", 3)
