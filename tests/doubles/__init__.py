"""Stand-ins and input factories that several test tiers share."""
