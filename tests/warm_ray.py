"""Ray starts this file in the place of its own program for a worker's setup (`run_world`).

Ray starts Python twice for each worker, which imports Ray twice, then Flower and torch: that takes
six seconds of a processor. This asks for a fork of a process that has imported them, and ends when
the fork ends.
"""

import sys

from warm import Warm

if __name__ == "__main__":
    sys.exit(Warm(sys.argv[1:], program="ray worker", stdout=sys.stdout, stderr=sys.stderr).wait())
