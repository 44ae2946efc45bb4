"""Great Expectations suites as code, and the quarantine."""
