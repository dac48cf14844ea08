"""What looks at programs: check, lint."""
