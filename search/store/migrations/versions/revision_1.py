"""The tables of before there were revisions, so a database that has none is of this one."""

import sqlalchemy as sa
from alembic import op

revision = "1"
down_revision = None


def upgrade() -> None:
    """Make what is missing of them."""
    keys = ("workload", "device", "regime", "numerics")
    record = ("label", "versions", "payload", "checksum", "created")
    _table("fuseplan_meta", ("name",), ("value",))
    _table("devices", ("device",), ("payload", "checksum", "created"))
    _table("captures", ("name",), ("payload", "checksum", "created"))
    _table("tuning_records", keys, record)
    _table("plan_records", keys, record)
    _table(
        "trials", (*keys, "backend"), ("versions", "payload", "created"),
        sa.Column("config_hash", sa.String(64), primary_key=True), sa.Column("open", sa.Integer, nullable=False),
        sa.Column("median_us", sa.Float),
    )
    _table("misses", keys, ("label", "payload", "first_seen"), sa.Column("count", sa.Integer, nullable=False))


def _table(name: str, keys: tuple[str, ...], texts: tuple[str, ...], *more: sa.Column[object]) -> None:
    op.create_table(
        name, *(sa.Column(key, sa.String(255), primary_key=True) for key in keys),
        *(sa.Column(text, sa.Text, nullable=False) for text in texts), *more, if_not_exists=True,
    )
