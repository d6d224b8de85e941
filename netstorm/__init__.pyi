from netstorm.errors import NetStormError as NetStormError
from netstorm.errors import PeerError as PeerError
from netstorm.errors import Unavailable as Unavailable
from netstorm.errors import UsageError as UsageError
from netstorm.frontends.numpy import Group as Group
from netstorm.frontends.numpy import GroupFuture as GroupFuture

__all__ = ["Group", "GroupFuture", "NetStormError", "PeerError", "Unavailable", "UsageError", "__version__"]
__version__: str
