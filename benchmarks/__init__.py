"""Speed measurements. They are run by hand (`make bench`), committed, and never asserted in CI."""
