"""The commands of `orthoconv`, a module for each."""
