"""The tables that configurations choose from: every row is whole, and nothing outside them can be chosen."""

import dataclasses
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest

from shardwright.errors import UsageError
from shardwright.training.zoo.optimizers import DECAYS
from shardwright.training.zoo.options import Config
from shardwright.training.zoo.rows import Decay, LossRow
from shardwright.training.zoo.tables import DATA, LOSSES, MODELS, OPTIMIZERS, SCHEDULES

TABLES = {table.section: table for table in (DATA, MODELS, LOSSES, OPTIMIZERS, SCHEDULES)}
ROWS = [(section, name) for section, table in TABLES.items() for name in table.rows]


def test_a_section_of_a_configuration_has_the_table_of_its_name():
    tables = {f.name: f.metadata["table"] for f in dataclasses.fields(Config) if "table" in f.metadata}
    assert tables == TABLES


@pytest.mark.parametrize(("section", "name"), ROWS)
def test_the_options_of_a_row_begin_with_the_key_that_chooses_it(section, name):
    table = TABLES[section]
    options = table.options(name)
    assert next(iter(dataclasses.asdict(options).items())) == (table.key, name)
    assert table.row(options) is table.rows[name]
    assert isinstance(options, get_type_hints(Config)[section])


@pytest.mark.parametrize("section", TABLES)
def test_an_unknown_name_is_answered_with_those_that_are_known(section):
    table = TABLES[section]
    with pytest.raises(UsageError) as refused:
        table.row(SimpleNamespace(**{table.key: "nothing"}))
    known = ", ".join(table.rows)
    assert str(refused.value) == f"{section}.{table.key}: 'nothing' is unknown; choose one of {known}"


@pytest.mark.parametrize("name", MODELS.rows)
def test_what_a_model_names_is_there(name):
    row = MODELS.rows[name]
    assert isinstance(LOSSES.rows[row.loss], LossRow)
    assert row.classes is None or row.classes in {f.name for f in dataclasses.fields(row.options)}


def test_targets_of_data_have_a_loss():
    assert {row.targets for row in DATA.rows.values()} <= {row.targets for row in LOSSES.rows.values()}


def test_every_decay_says_which_parameters_it_acts_on():
    assert tuple(DECAYS) == get_args(Decay)
