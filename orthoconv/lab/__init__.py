"""The laboratory around the layers: commands, experiments, plots. Nothing below it prints or reads arguments."""
