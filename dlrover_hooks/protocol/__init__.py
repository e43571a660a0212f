"""Messages between workers, agents, keepers and the master, the one table of routes, and value types they share.

It knows no transport and does no I/O. The way in: `from dlrover_hooks import protocol as p`; `ranges` and
`restored_value_check` are imported by module.
"""

from __future__ import annotations

from dlrover_hooks.protocol.base_messages import (
    AGAIN as AGAIN,
    BAD_NODE as BAD_NODE,
    LARGEST_EVERY as LARGEST_EVERY,
    LARGEST_STEP as LARGEST_STEP,
    PROTOCOL as PROTOCOL,
    REQUEUE as REQUEUE,
    Count as Count,
    Done as Done,
    Every as Every,
    ExitCode as ExitCode,
    Message as Message,
    Passed as Passed,
    Phase as Phase,
    Port as Port,
    Problem as Problem,
    Rank as Rank,
    Rate as Rate,
    Seconds as Seconds,
    Size as Size,
    Status as Status,
    Step as Step,
    World as World,
)
from dlrover_hooks.protocol.checkpoint_messages import (
    Attach as Attach,
    Attached as Attached,
    AwaitPlan as AwaitPlan,
    Cadence as Cadence,
    Generation as Generation,
    Held as Held,
    KeeperAddress as KeeperAddress,
    Loaded as Loaded,
    Locate as Locate,
    Located as Located,
    Manifest as Manifest,
    Plan as Plan,
    Replication as Replication,
    Restore as Restore,
    Retention as Retention,
    Secret as Secret,
    ShardFile as ShardFile,
    Source as Source,
    Unstored as Unstored,
    Vote as Vote,
    Voted as Voted,
    VoteKind as VoteKind,
)
from dlrover_hooks.protocol.key_value_messages import (
    AwaitKeys as AwaitKeys,
    Change as Change,
    ChangeKeys as ChangeKeys,
    KeyChange as KeyChange,
    KeyNames as KeyNames,
    KeyValues as KeyValues,
    ListKeys as ListKeys,
)
from dlrover_hooks.protocol.lease_messages import (
    Ack as Ack,
    AwaitShards as AwaitShards,
    Lease as Lease,
    Leases as Leases,
    Ledger as Ledger,
    LedgerState as LedgerState,
    LedgerView as LedgerView,
    OpenLedger as OpenLedger,
    Partition as Partition,
    Quarantined as Quarantined,
    ShowLedger as ShowLedger,
    TakeLeases as TakeLeases,
)
from dlrover_hooks.protocol.membership_messages import (
    AwaitParting as AwaitParting,
    AwaitRound as AwaitRound,
    Beat as Beat,
    Departure as Departure,
    Ending as Ending,
    Exited as Exited,
    Heartbeat as Heartbeat,
    Hold as Hold,
    Join as Join,
    Joined as Joined,
    Leave as Leave,
    Notice as Notice,
    Parting as Parting,
    Preempt as Preempt,
    Seat as Seat,
    Seated as Seated,
    Vitals as Vitals,
    Watch as Watch,
)
from dlrover_hooks.protocol.routes import (
    ROUTES as ROUTES,
    Route as Route,
    Routes as Routes,
)
from dlrover_hooks.protocol.view_messages import (
    LISTED_GONE as LISTED_GONE,
    DeleteJob as DeleteJob,
    Jobs as Jobs,
    JobView as JobView,
    ListJobs as ListJobs,
    MemberView as MemberView,
    ShowJob as ShowJob,
    Unlisted as Unlisted,
)
