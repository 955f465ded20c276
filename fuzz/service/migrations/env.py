"""Alembic runs this inside the transaction in which a store is opened."""

from alembic import context

from fuzz.service.schema import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata,
                  render_as_batch=True, transactional_ddl=True)
context.run_migrations()
