"""Every setting, declared once, and the only place that reads the environment.

`Settings.from_environment()` reads the variables; its arguments win over them; a wrong value is a
`SettingsError` that names the variable, the value and what is allowed. The table in
docs/reference/settings.md is generated from the declarations.

Names that users of MXNet's ps-lite know are kept (`DMLC_*`, `PS_*`), and so are those of the NetStorm paper
(arXiv 2404.11352); all others begin with `NETSTORM_`.
"""

from netstorm.settings.sections import JOB_WIDE, AuxRule, AuxSearch, LogLevel, Role, TopologyName
from netstorm.settings.values import (
    FOREIGN_VARIABLES,
    Settings,
    Source,
    child_environment,
    declarations,
    foreign_variable,
    set_for_children,
    unknown_variables,
)

__all__ = [
    "FOREIGN_VARIABLES",
    "JOB_WIDE",
    "AuxRule",
    "AuxSearch",
    "LogLevel",
    "Role",
    "Settings",
    "Source",
    "TopologyName",
    "child_environment",
    "declarations",
    "foreign_variable",
    "set_for_children",
    "unknown_variables",
]
