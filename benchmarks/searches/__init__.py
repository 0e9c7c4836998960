"""Our searches against published ones at equal budgets: SWIFT, Draft & Verify, TPE, random and odd skip sets."""
