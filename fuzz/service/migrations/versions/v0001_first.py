"""The tables of the first version."""

from alembic import op
from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Float,
    ForeignKey,
    Integer,
    String,
    Text,
    UniqueConstraint,
)

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "campaigns",
        Column("id", Integer, primary_key=True),
        Column("name", Text, nullable=False),
        Column("mode", String(20), nullable=False),
        Column("file", JSON, nullable=False),
        Column("tracked", JSON, nullable=False),
        Column("created", BigInteger, nullable=False),
        UniqueConstraint("name"),
    )
    op.create_table(
        "findings",
        Column("fingerprint", String(40), primary_key=True),
        Column("family", String(40), nullable=False),
        Column("kind", String(20), nullable=False),
        Column("region", Text, nullable=False),
        Column("release", Text, nullable=False),
        Column("target", Text, nullable=False),
        Column("spec", Text, nullable=False),
        Column("path", Text, nullable=False),
        Column("diagnosis", Text, nullable=False, server_default=""),
        Column("state", String(20), nullable=False),
        Column("reason", Text, nullable=False, server_default=""),
        Column("fixed_in", Text, nullable=False, server_default=""),
        Column("results", JSON, nullable=False),
        Column("count", BigInteger, nullable=False, server_default="0"),
        Column("first_seen", BigInteger, nullable=False),
        Column("last_seen", BigInteger, nullable=False),
    )
    op.create_index("ix_findings_family", "findings", ["family"])
    op.create_index("ix_findings_last_seen_fingerprint", "findings", ["last_seen", "fingerprint"])
    op.create_index("ix_findings_release_last_seen", "findings", ["release", "last_seen"])
    op.create_index("ix_findings_state_last_seen", "findings", ["state", "last_seen"])
    op.create_table(
        "paths",
        Column("id", Integer, primary_key=True),
        Column("release", Text, nullable=False),
        Column("target", Text, nullable=False),
        Column("spec", Text, nullable=False),
        Column("where", String(20), nullable=False),
        Column("layout", String(20), nullable=False),
        Column("flags", Text, nullable=False),
        UniqueConstraint("release", "target", "spec", "where", "layout", "flags"),
    )
    op.create_table(
        "verdicts",
        Column("id", Integer, primary_key=True),
        Column("release", Text, nullable=False),
        Column("target", Text, nullable=False),
        Column("obligation", Text, nullable=False),
        Column("arch", String(20), nullable=False),
        Column("spec", Text, nullable=False),
        Column("verdict", String(20), nullable=False),
        Column("diagnosis", Text, nullable=False, server_default=""),
        Column("at", BigInteger, nullable=False),
    )
    op.create_index("ix_verdicts_release_target_obligation_at", "verdicts",
                    ["release", "target", "obligation", "at"])
    op.create_table(
        "coverage",
        Column("campaign", Integer, ForeignKey("campaigns.id"), primary_key=True),
        Column("path", Integer, ForeignKey("paths.id"), primary_key=True),
        Column("boundary", Text, primary_key=True),
        Column("count", BigInteger, nullable=False, server_default="0"),
        Column("first_seen", BigInteger, nullable=True),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "documents",
        Column("fingerprint", String(40), ForeignKey("findings.fingerprint"), primary_key=True),
        Column("digest", String(40), nullable=False),
        Column("document", JSON, nullable=False),
    )
    op.create_table(
        "history",
        Column("id", Integer, primary_key=True),
        Column("fingerprint", String(40), ForeignKey("findings.fingerprint"), nullable=False),
        Column("at", BigInteger, nullable=False),
        Column("before", String(20), nullable=False),
        Column("after", String(20), nullable=False),
        Column("reason", Text, nullable=False, server_default=""),
        Column("who", Text, nullable=False, server_default=""),
    )
    op.create_index("ix_history_fingerprint_at", "history", ["fingerprint", "at"])
    op.create_table(
        "notes",
        Column("campaign", Integer, ForeignKey("campaigns.id"), primary_key=True),
        Column("kind", String(20), primary_key=True),
        Column("text", Text, primary_key=True),
        Column("count", BigInteger, nullable=False, server_default="0"),
        Column("first_seen", BigInteger, nullable=False),
        Column("last_seen", BigInteger, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "rates",
        Column("campaign", Integer, ForeignKey("campaigns.id"), primary_key=True),
        Column("width", Integer, primary_key=True),
        Column("start", BigInteger, primary_key=True),
        Column("path", Integer, ForeignKey("paths.id"), primary_key=True),
        Column("launches", BigInteger, nullable=False, server_default="0"),
        Column("sequences", BigInteger, nullable=False, server_default="0"),
        Column("cells", BigInteger, nullable=False, server_default="0"),
        Column("wrong_cells", BigInteger, nullable=False, server_default="0"),
        Column("kernels", BigInteger, nullable=False, server_default="0"),
        Column("compile_seconds", Float, nullable=False, server_default="0"),
        Column("run_seconds", Float, nullable=False, server_default="0"),
        Column("kernel_seconds", Float, nullable=False, server_default="0"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "replays",
        Column("id", Integer, primary_key=True),
        Column("fingerprint", String(40), ForeignKey("findings.fingerprint"), nullable=False),
        Column("release", Text, nullable=False),
        Column("result", String(20), nullable=False),
        Column("text", Text, nullable=False, server_default=""),
        Column("count", BigInteger, nullable=False, server_default="0"),
        Column("since", BigInteger, nullable=False),
        Column("at", BigInteger, nullable=False),
    )
    op.create_index("ix_replays_fingerprint_at", "replays", ["fingerprint", "at"])
    op.create_table(
        "sightings",
        Column("campaign", Integer, ForeignKey("campaigns.id"), primary_key=True),
        Column("fingerprint", String(40), ForeignKey("findings.fingerprint"), primary_key=True),
        Column("count", BigInteger, nullable=False, server_default="0"),
        Column("first_seen", BigInteger, nullable=False),
        Column("last_seen", BigInteger, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "streams",
        Column("id", String(40), primary_key=True),
        Column("campaign", Integer, ForeignKey("campaigns.id"), nullable=False),
        Column("folder", Text, nullable=False),
        Column("position", BigInteger, nullable=False, server_default="0"),
    )
    op.create_table(
        "targets",
        Column("campaign", Integer, ForeignKey("campaigns.id"), primary_key=True),
        Column("name", Text, primary_key=True),
        Column("release", Text, nullable=False),
        Column("spec", Text, nullable=False),
        Column("source", JSON, nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "runs",
        Column("id", String(40), primary_key=True),
        Column("campaign", Integer, ForeignKey("campaigns.id"), nullable=False),
        Column("stream", String(40), ForeignKey("streams.id"), nullable=False),
        Column("started", BigInteger, nullable=False),
        Column("seen", BigInteger, nullable=False),
        Column("ended", BigInteger, nullable=True),
        Column("because", Text, nullable=False, server_default=""),
        Column("host", Text, nullable=False, server_default=""),
        Column("backend", Text, nullable=False, server_default=""),
        Column("device", Text, nullable=False, server_default=""),
        Column("seed", BigInteger, nullable=False, server_default="0"),
        Column("workers", BigInteger, nullable=False, server_default="0"),
        Column("versions", JSON, nullable=False),
    )
    op.create_index("ix_runs_campaign_started", "runs", ["campaign", "started"])
