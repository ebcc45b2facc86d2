"""Hypothesis strategies and the rule-based machines. They only draw; worlds decide and laws judge."""
