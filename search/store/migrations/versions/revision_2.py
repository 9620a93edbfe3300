"""Leases of tuners, and an index for captures by the beginning of their names."""

import sqlalchemy as sa
from alembic import op

revision = "2"
down_revision = "1"


def upgrade() -> None:
    """Make both, where they are missing."""
    op.create_table(
        "leases",
        *(sa.Column(key, sa.String(255), primary_key=True) for key in ("workload", "device", "regime", "numerics")),
        sa.Column("owner", sa.String(255), nullable=False), sa.Column("expires", sa.Float, nullable=False),
        sa.Column("taken", sa.Text, nullable=False), if_not_exists=True,
    )
    if op.get_bind().dialect.name == "postgresql":
        op.create_index(
            "captures_by_prefix", "captures", ["name"], postgresql_ops={"name": "varchar_pattern_ops"},
            if_not_exists=True,
        )
