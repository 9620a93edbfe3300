"""What Alembic runs to reach the database: the connection that it was given."""

from alembic import context

from fuseplan.search.store.migrations import TABLE
from fuseplan.search.store.tables import METADATA

context.configure(
    connection=context.config.attributes["connection"], target_metadata=METADATA, version_table=TABLE,
)
with context.begin_transaction():
    context.run_migrations()
