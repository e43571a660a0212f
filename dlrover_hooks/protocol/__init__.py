"""Messages between workers, agents, keepers and the master, the one table of routes, and value types they share.

It knows no transport and does no I/O. The way in: `from dlrover_hooks import protocol as p`; `ranges` and `shapes` are
imported by module.
"""

from __future__ import annotations

from dlrover_hooks.protocol.base_messages import (
    AGAIN as AGAIN,
)
from dlrover_hooks.protocol.base_messages import (
    BAD_NODE as BAD_NODE,
)
from dlrover_hooks.protocol.base_messages import (
    LARGEST_EVERY as LARGEST_EVERY,
)
from dlrover_hooks.protocol.base_messages import (
    LARGEST_STEP as LARGEST_STEP,
)
from dlrover_hooks.protocol.base_messages import (
    PROTOCOL as PROTOCOL,
)
from dlrover_hooks.protocol.base_messages import (
    REQUEUE as REQUEUE,
)
from dlrover_hooks.protocol.base_messages import (
    Count as Count,
)
from dlrover_hooks.protocol.base_messages import (
    Done as Done,
)
from dlrover_hooks.protocol.base_messages import (
    Every as Every,
)
from dlrover_hooks.protocol.base_messages import (
    ExitCode as ExitCode,
)
from dlrover_hooks.protocol.base_messages import (
    Message as Message,
)
from dlrover_hooks.protocol.base_messages import (
    Passed as Passed,
)
from dlrover_hooks.protocol.base_messages import (
    Phase as Phase,
)
from dlrover_hooks.protocol.base_messages import (
    Port as Port,
)
from dlrover_hooks.protocol.base_messages import (
    Problem as Problem,
)
from dlrover_hooks.protocol.base_messages import (
    Rank as Rank,
)
from dlrover_hooks.protocol.base_messages import (
    Rate as Rate,
)
from dlrover_hooks.protocol.base_messages import (
    Seconds as Seconds,
)
from dlrover_hooks.protocol.base_messages import (
    Size as Size,
)
from dlrover_hooks.protocol.base_messages import (
    Status as Status,
)
from dlrover_hooks.protocol.base_messages import (
    Step as Step,
)
from dlrover_hooks.protocol.base_messages import (
    World as World,
)
from dlrover_hooks.protocol.checkpoint_messages import (
    Attach as Attach,
)
from dlrover_hooks.protocol.checkpoint_messages import (
    Attached as Attached,
)
from dlrover_hooks.protocol.checkpoint_messages import (
    AwaitPlan as AwaitPlan,
)
from dlrover_hooks.protocol.checkpoint_messages import (
    Cadence as Cadence,
)
from dlrover_hooks.protocol.checkpoint_messages import (
    Generation as Generation,
)
from dlrover_hooks.protocol.checkpoint_messages import (
    Held as Held,
)
from dlrover_hooks.protocol.checkpoint_messages import (
    KeeperAddress as KeeperAddress,
)
from dlrover_hooks.protocol.checkpoint_messages import (
    Loaded as Loaded,
)
from dlrover_hooks.protocol.checkpoint_messages import (
    Locate as Locate,
)
from dlrover_hooks.protocol.checkpoint_messages import (
    Located as Located,
)
from dlrover_hooks.protocol.checkpoint_messages import (
    Manifest as Manifest,
)
from dlrover_hooks.protocol.checkpoint_messages import (
    Plan as Plan,
)
from dlrover_hooks.protocol.checkpoint_messages import (
    Replication as Replication,
)
from dlrover_hooks.protocol.checkpoint_messages import (
    Restore as Restore,
)
from dlrover_hooks.protocol.checkpoint_messages import (
    Retention as Retention,
)
from dlrover_hooks.protocol.checkpoint_messages import (
    Secret as Secret,
)
from dlrover_hooks.protocol.checkpoint_messages import (
    ShardFile as ShardFile,
)
from dlrover_hooks.protocol.checkpoint_messages import (
    Source as Source,
)
from dlrover_hooks.protocol.checkpoint_messages import (
    Unstored as Unstored,
)
from dlrover_hooks.protocol.checkpoint_messages import (
    Vote as Vote,
)
from dlrover_hooks.protocol.checkpoint_messages import (
    Voted as Voted,
)
from dlrover_hooks.protocol.checkpoint_messages import (
    VoteKind as VoteKind,
)
from dlrover_hooks.protocol.key_value_messages import (
    AwaitKeys as AwaitKeys,
)
from dlrover_hooks.protocol.key_value_messages import (
    Change as Change,
)
from dlrover_hooks.protocol.key_value_messages import (
    ChangeKeys as ChangeKeys,
)
from dlrover_hooks.protocol.key_value_messages import (
    KeyChange as KeyChange,
)
from dlrover_hooks.protocol.key_value_messages import (
    KeyNames as KeyNames,
)
from dlrover_hooks.protocol.key_value_messages import (
    KeyValues as KeyValues,
)
from dlrover_hooks.protocol.key_value_messages import (
    ListKeys as ListKeys,
)
from dlrover_hooks.protocol.lease_messages import (
    Ack as Ack,
)
from dlrover_hooks.protocol.lease_messages import (
    AwaitShards as AwaitShards,
)
from dlrover_hooks.protocol.lease_messages import (
    Lease as Lease,
)
from dlrover_hooks.protocol.lease_messages import (
    Leases as Leases,
)
from dlrover_hooks.protocol.lease_messages import (
    Ledger as Ledger,
)
from dlrover_hooks.protocol.lease_messages import (
    LedgerState as LedgerState,
)
from dlrover_hooks.protocol.lease_messages import (
    LedgerView as LedgerView,
)
from dlrover_hooks.protocol.lease_messages import (
    OpenLedger as OpenLedger,
)
from dlrover_hooks.protocol.lease_messages import (
    Partition as Partition,
)
from dlrover_hooks.protocol.lease_messages import (
    Quarantined as Quarantined,
)
from dlrover_hooks.protocol.lease_messages import (
    ShowLedger as ShowLedger,
)
from dlrover_hooks.protocol.lease_messages import (
    TakeLeases as TakeLeases,
)
from dlrover_hooks.protocol.round_messages import (
    AwaitParting as AwaitParting,
)
from dlrover_hooks.protocol.round_messages import (
    AwaitRound as AwaitRound,
)
from dlrover_hooks.protocol.round_messages import (
    Beat as Beat,
)
from dlrover_hooks.protocol.round_messages import (
    Departure as Departure,
)
from dlrover_hooks.protocol.round_messages import (
    Ending as Ending,
)
from dlrover_hooks.protocol.round_messages import (
    Exited as Exited,
)
from dlrover_hooks.protocol.round_messages import (
    Heartbeat as Heartbeat,
)
from dlrover_hooks.protocol.round_messages import (
    Hold as Hold,
)
from dlrover_hooks.protocol.round_messages import (
    Join as Join,
)
from dlrover_hooks.protocol.round_messages import (
    Joined as Joined,
)
from dlrover_hooks.protocol.round_messages import (
    Leave as Leave,
)
from dlrover_hooks.protocol.round_messages import (
    Notice as Notice,
)
from dlrover_hooks.protocol.round_messages import (
    Parting as Parting,
)
from dlrover_hooks.protocol.round_messages import (
    Preempt as Preempt,
)
from dlrover_hooks.protocol.round_messages import (
    Seat as Seat,
)
from dlrover_hooks.protocol.round_messages import (
    Seated as Seated,
)
from dlrover_hooks.protocol.round_messages import (
    Vitals as Vitals,
)
from dlrover_hooks.protocol.round_messages import (
    Watch as Watch,
)
from dlrover_hooks.protocol.routes import (
    ROUTES as ROUTES,
)
from dlrover_hooks.protocol.routes import (
    Route as Route,
)
from dlrover_hooks.protocol.routes import (
    Routes as Routes,
)
from dlrover_hooks.protocol.view_messages import (
    DeleteJob as DeleteJob,
)
from dlrover_hooks.protocol.view_messages import (
    Jobs as Jobs,
)
from dlrover_hooks.protocol.view_messages import (
    JobView as JobView,
)
from dlrover_hooks.protocol.view_messages import (
    ListJobs as ListJobs,
)
from dlrover_hooks.protocol.view_messages import (
    MemberView as MemberView,
)
from dlrover_hooks.protocol.view_messages import (
    ShowJob as ShowJob,
)
