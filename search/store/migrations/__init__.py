"""Revisions of the database's tables, and what brings an older database up to date.

Each file in ``versions/`` is one step of Alembic's. A revision only adds, so that an older fuseplan still reads what a
newer one made; what it cannot read is of another schema version.
"""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa

#: Every revision, in order; the last one is what :data:`~fuseplan.search.store.tables.METADATA` describes.
KNOWN = ("1", "2")
#: Where a database keeps its revision: not Alembic's own name, for another application may use that beside us.
TABLE = "fuseplan_revision"
REVISION = sa.Table(
    TABLE, sa.MetaData(), sa.Column("version_num", sa.String(32), nullable=False),
    sa.PrimaryKeyConstraint("version_num", name=f"{TABLE}_pkc"),
)


def mark_new(connection: sa.Connection) -> None:
    """Write down that the tables, just made, are of the last revision."""
    REVISION.create(connection)
    connection.execute(REVISION.insert().values(version_num=KNOWN[-1]))


def upgrade(connection: sa.Connection) -> None:
    """Bring the tables up to date, within the caller's transaction, unless another process has been quicker."""
    if sa.inspect(connection).has_table(TABLE) and connection.scalar(sa.select(REVISION)) == KNOWN[-1]:
        return
    from alembic import command  # here: to import it takes longer than to list a database
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
