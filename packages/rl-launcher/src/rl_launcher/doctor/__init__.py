"""What is installed, what of it works here, and what each feature lacks: `rl-launcher doctor`.

Everything heavy is tried in processes of its own, with a deadline: nothing that hangs or crashes there ends the doctor.
"""

from rl_launcher.doctor.diagnosis import Diagnosis, diagnose
from rl_launcher.doctor.screen import doctor

__all__ = ["Diagnosis", "diagnose", "doctor"]
