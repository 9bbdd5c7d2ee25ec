"""Who calls: one folder per framework, each over the public interface only."""
