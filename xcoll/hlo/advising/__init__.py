"""The kinds of advice that an audit gives, one a module."""
